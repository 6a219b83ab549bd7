"""Storage backends: the only modules that touch disks."""
