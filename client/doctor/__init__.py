"""Checks of a machine and of the way to others, each with what to do where something is wrong."""
