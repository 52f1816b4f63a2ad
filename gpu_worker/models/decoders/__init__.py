"""Forward passes over one batch, with keys and values in pages."""
