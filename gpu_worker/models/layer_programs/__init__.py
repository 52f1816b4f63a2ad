"""Layers of Transformers' hybrid models as programs of the extension: all that they do to a step's tokens in one call."""
