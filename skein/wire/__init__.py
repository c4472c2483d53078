"""Messages that cross process borders, how they travel, and the values that only drivers exchange."""

import os

# gRPC reads this once, when it is first imported. Its notes on peers that went away would stand among our own lines.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# TLS 1.3 has suites of its own. What 1.2 gets needs a kind of key that nobody here has, so it is never spoken.
os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-RSA-AES128-GCM-SHA256"
