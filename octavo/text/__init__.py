"""Text and tokens, for routers and for offline use. It needs `tokenizers` and `jinja2`, which clients do not have."""
