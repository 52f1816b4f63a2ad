"""The stateless router: it accepts, places and streams. All that a request depends on can be built again elsewhere."""
