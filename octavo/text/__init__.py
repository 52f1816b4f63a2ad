"""Text and tokens: what the router and offline use share. Needs `tokenizers` and `jinja2`, which clients do not."""
