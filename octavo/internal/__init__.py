"""The contract between routers and workers, apart from the one that clients use."""
