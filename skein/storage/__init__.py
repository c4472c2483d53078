"""Places of files that a job names, and how they are opened: the one way to anything that a job file points at."""
