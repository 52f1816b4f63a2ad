"""What the APIs that speak in turns have in common: turns into a chat, and the parts of an output."""
