"""The embedded async sharded array store: boxes, segments, manifest, transaction and I/O. Knows no JAX."""
