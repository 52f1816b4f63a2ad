"""What `octavo bench` tells: the figures, what to know of them, and how they are shown."""
