"""Judgements of a simulated world from outside."""
