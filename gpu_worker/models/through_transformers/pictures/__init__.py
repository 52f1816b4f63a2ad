"""Models in whose prompts pictures stand."""
