"""Part of Skein: the command and the Python interface."""
