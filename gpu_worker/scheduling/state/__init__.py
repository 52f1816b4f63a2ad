"""Which sequences there are, and where each of them and its blocks are."""
