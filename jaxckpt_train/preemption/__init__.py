"""Requests to shut down: signals, schedulers and clouds, how processes agree, and how the job stops."""
