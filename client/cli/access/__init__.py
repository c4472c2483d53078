"""Commands about who may come, and about what was done: identities, tokens, the audit log."""
