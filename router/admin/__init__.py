"""What operators ask of this router."""
