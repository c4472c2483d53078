"""What the coordinator tells: its log, its metrics, and the status of jobs and workers."""
