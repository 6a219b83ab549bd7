"""Benchmarks of checkpoint saves and loads against other libraries and the limits of disk and memory."""
