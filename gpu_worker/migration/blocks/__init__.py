"""How KV blocks travel between two workers: one TCP connection per pair, many tickets on it."""
