"""JAX pytrees as named arrays: flattening, snapshots, partitioning, restoring."""
