"""Looks at runs and checkpoints without JAX: what there is, what is in it, and how two of them differ."""
