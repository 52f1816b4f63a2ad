"""Outputs that have to be of a form: which tokens may come next."""
