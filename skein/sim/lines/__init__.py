"""Carriers of messages and tensors between simulated processes, and what befalls these on the way."""
