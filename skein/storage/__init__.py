"""Where files that a job names may lie, and how they are opened: the one way to anything that a job file points at."""
