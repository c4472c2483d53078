"""Forms in which devices of a mesh share a stage: parts of its parameters, and of what goes through it."""
