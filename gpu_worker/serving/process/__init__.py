"""The life of a worker process, and what it tells of itself."""
