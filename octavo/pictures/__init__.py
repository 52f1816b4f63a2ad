"""Pictures of requests: how they are read, how large they are to a model, and where they stand in a prompt."""
