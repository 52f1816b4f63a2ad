"""Takes requests from the queue and assigns each sequence to a worker."""
