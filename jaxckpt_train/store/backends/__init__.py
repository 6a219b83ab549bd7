"""Storage backends, the only modules that access disks."""
