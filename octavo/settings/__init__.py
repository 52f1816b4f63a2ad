"""What each program is told, by which flag, variable or file."""
