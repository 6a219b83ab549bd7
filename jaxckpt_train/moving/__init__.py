"""Copies and moves checkpoints, and steps of runs, to where they are asked for; no JAX."""
