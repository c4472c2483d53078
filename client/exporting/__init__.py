"""Weights for other programs: what a checkpoint becomes, and how it gets here."""
