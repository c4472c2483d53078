"""Skein: fault-tolerant, decentralized training over slow and unequal links."""

__version__ = "0.1.0"

PROTOCOL_VERSION = 11
"""Raised when a worker of one release can no longer speak to a coordinator of another."""
