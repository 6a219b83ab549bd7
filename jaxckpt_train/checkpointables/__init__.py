"""Checkpointables: what can be saved under a name of its own, and the adapters that take it apart and put it together."""
