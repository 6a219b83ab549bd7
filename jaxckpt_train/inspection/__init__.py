"""Inspect the contents of runs and checkpoints, without JAX."""
