"""Chunks on this worker: made present, copied, saved and read back."""
