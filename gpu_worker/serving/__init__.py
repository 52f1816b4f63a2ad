"""The worker process: the step loop, the journal, the Worker service, the lease."""
