"""Load of the devices of a mesh, and the form that they share a stage in."""
