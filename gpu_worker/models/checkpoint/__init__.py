"""Where the weights of a model are, and how they are read."""
