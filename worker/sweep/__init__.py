"""Trials that differ in numbers only, trained side by side as the rows of one array."""
