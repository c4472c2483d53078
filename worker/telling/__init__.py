"""What a worker tells of itself: its log, its metrics, and moments in words."""
