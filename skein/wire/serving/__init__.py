"""Parts of a server that come before it knows who calls: room, health, small pages, and refusals."""
