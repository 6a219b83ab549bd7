"""A run directory: a sequence of steps, when they are saved and how long they are kept."""
