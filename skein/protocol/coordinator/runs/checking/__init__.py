"""Checks of what workers contribute: a step computed again without one of them, and what follows from it."""
