"""What the worker does that a sequence leaves."""
