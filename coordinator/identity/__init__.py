"""Identities of a cluster: the authority of its coordinator, and what that remembers of tokens and certificates."""
