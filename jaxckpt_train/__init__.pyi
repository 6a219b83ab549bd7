"""The public names with their types, for type checkers. `__init__.py` imports each name at its first use."""
