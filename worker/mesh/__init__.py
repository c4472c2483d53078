"""A worker with several devices: one process for each, which compute a stage's ops together."""
