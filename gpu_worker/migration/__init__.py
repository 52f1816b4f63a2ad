"""How a running sequence moves to another worker with its blocks: what its source and its target do."""
