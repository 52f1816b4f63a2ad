"""The operations of other engines by their own names and argument order."""
