"""Log, metrics and moments in words, by which a worker tells of itself."""
