"""Sweeps: trials that a job file asks for, and the arrays that they are packed into."""
