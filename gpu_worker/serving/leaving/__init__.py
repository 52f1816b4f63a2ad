"""How sequences leave a worker that ends or is emptied."""
