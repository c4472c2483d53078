"""Messages that cross process borders, how they travel, and the values that only drivers exchange."""

import os

# gRPC reads this once, when it is first imported. Its notes on peers that went away would stand among our own lines.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
