"""Exchanges of a rule: one member's side, and whole ones in memory."""
