"""Servers, channels, and what every connection has: health, reflection, TLS, traces."""
