"""Output of the coordinator: its log, its metrics, and the status of jobs and workers."""
