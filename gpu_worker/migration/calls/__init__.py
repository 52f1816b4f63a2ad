"""What workers say to each other, and over what."""
