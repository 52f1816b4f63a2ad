"""Guesses of the next tokens of a branch, and how many of them are worth a row of a step."""
