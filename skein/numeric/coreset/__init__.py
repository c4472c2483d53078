"""Weighted parts of a data set that stand for the whole of it, by greedy facility location."""
