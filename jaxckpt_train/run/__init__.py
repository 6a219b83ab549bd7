"""One run: its directory, lock, history, retention, saving and restoring."""
