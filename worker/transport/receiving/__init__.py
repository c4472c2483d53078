"""Streams of tensors from peers: a place for each, and a window for its bytes."""
