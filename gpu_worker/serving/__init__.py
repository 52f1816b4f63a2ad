"""The worker process: the journal, the Worker service, the lease, and health."""
