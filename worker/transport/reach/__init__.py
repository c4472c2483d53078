"""Ways to peers that cannot be dialled, and what each worker finds out of them."""
