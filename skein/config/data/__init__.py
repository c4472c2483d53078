"""Data of a job: what samples are made of, and how they are read."""
