"""A small job file that ends where its sweep begins."""

RATES = """
name: rates
model: {family: mlp, widths: [64, 32, 10]}
data: {sources: [{format: digits}]}
parallel: {stages: 1}
budget: {steps: 50}
sweep:
"""
