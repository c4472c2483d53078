"""Hostile input: what is sent, who sends it, and what came of it."""
