"""Layers of Transformers' hybrids as programs of the extension: what they do to a step's tokens, in one call."""
