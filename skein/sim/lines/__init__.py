"""What carries messages and tensors between simulated processes, and what befalls it on the way."""
