"""Groups on several hosts: who brings them together, and how they talk."""
