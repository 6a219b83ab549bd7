"""The command `jaxckpt`: looks at runs and checkpoints, moves them, and changes them into other formats and back."""
