"""How far the requests here have come, and what was counted of them."""
