"""Meshes as a job asks for them: forms in which devices of a worker share its stages."""
