"""Substitutes for torch: the cost model, and real numbers where they matter."""
