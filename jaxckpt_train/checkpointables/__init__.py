"""Checkpointables: what can be saved under a name of its own, and the adapters for each kind."""
