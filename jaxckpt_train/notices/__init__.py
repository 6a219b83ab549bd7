"""Sources of preemption notices beyond signals, a file and the time: clouds, and what runs the job."""
