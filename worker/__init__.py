"""Part of Skein: the daemon that trains."""
