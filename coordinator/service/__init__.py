"""The coordinator's gRPC services; nothing else in this package speaks gRPC."""
