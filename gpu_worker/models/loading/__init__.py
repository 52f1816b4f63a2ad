"""How files that are found become a model: `loader` opens them by these modules."""
