"""The processes of a job: rendezvous, key-value store, shared memory."""
