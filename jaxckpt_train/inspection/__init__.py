"""What runs and checkpoints contain, without JAX."""
