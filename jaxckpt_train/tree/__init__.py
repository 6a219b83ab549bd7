"""Pytrees: to named leaves and back, snapshots, differences between a checkpoint and a target, placement on devices."""
