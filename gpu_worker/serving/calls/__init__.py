"""How each call of a router is answered."""
