"""Commands about who may come and look, and about what was done: identities, tokens, the page, the audit log."""
