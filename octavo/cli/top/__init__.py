"""`octavo top`: the state of the cluster in a terminal."""
