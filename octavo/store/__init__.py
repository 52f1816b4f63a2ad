"""One record per sequence, kept where every process can reach it."""
