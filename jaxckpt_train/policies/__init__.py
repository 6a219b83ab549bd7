"""When to save and which steps to keep: pure decisions over a context."""
