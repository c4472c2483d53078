"""A worker's part in choosing rows along a run: features where paths end, and picks of its own rows."""
