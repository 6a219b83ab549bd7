"""Other tools' checkpoints: readers that open them like checkpoints of this library, and writers for those tools."""
