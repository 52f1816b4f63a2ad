"""What stands in the files of a model that a program reads without torch."""
