"""Benchmarks of checkpoint saves and loads against Orbax and the raw limit of the disk."""
