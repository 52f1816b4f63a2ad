"""How values and errors become messages and statuses, and back."""
