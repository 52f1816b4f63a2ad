"""What models say in tagged text: calls of tools, and reasoning."""
