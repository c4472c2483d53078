"""Tensors from worker to worker: `peers` sends and asks, `intake` takes what `worker.service` receives."""
