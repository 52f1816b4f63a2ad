"""Text and tokens, for routers and for offline use. Needs `tokenizers` and `jinja2`, which clients do not have."""
