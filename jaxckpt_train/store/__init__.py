"""The embedded store for sharded arrays: boxes, segments, manifest, transaction and I/O. It does not import JAX."""
