"""The workers as this router sees them."""
