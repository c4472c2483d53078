"""The rules that send one bit per element, and the mean that they take."""
