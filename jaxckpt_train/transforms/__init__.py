"""Changes of a tree on its way: rename, split, stack, cast."""
