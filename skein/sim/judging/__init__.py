"""What is judged of a simulated world from outside."""
