"""Checkpoints of other tools, read as if they were ours, and written so that those tools read them."""
