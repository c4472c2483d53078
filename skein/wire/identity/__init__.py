"""Identities: who somebody is, how an authority says so, and what of that a process keeps."""
