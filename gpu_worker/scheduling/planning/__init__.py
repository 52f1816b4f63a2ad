"""Which sequences come in, run, or give up their blocks."""
