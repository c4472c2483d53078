"""Simulated processes of workers and of the coordinator, and what they keep, build and read."""
