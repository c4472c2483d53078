"""What a server has before it knows who calls: room, health, small pages, and refusals."""
