"""Endpoints that are more, or less, than one request and its answer."""
