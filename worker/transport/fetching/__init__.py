"""Asks peers for states, and makes them of the parts that come."""
