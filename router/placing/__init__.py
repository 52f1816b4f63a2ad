"""Pops sequences from the queue and assigns each to a worker."""
