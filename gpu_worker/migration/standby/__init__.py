"""Histories of running sequences in the prefix caches of other workers, in case that their owner dies."""
