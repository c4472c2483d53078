"""Part of Skein: the service that decides."""
