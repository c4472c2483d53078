"""Commands about a job."""
