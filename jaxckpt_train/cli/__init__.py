"""The command `jaxckpt`, which inspects, verifies, moves and converts runs and checkpoints."""
