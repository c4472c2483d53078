"""Hosting on Ray: the cluster, and the actor in it."""
