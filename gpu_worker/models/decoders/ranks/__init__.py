"""What one rank of a group computes of a decoder."""
