"""Forwards that nothing is learned from, at one worker: evaluations, probes and selections."""
