"""What a prompt is made of, beside the words of its client."""
