"""Checkpointables: values that are saved under their own names, and a handler for each kind of value."""
