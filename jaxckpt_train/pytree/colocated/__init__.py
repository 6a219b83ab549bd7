"""Saving and loading on the hosts of a single-controller job (Pathways)."""
