"""The stateless router: queues, places and streams; holds nothing that the store and the workers cannot give back."""
