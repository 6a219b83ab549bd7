"""Sinks: where the events of a run go besides its history."""
