"""One page about a run: what its files tell is gathered, drawn, and put together."""
