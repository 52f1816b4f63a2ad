"""What the worker does that a sequence comes to."""
