"""What stands in torch's place: the cost model, and real numbers where they matter."""
