"""Events of a run and the exporters that receive them."""
