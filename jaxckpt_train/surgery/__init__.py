"""Changes of a checkpoint's tree on its way to a load or another checkpoint, without all of it in memory."""
