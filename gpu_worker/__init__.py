"""The worker: owns the blocks of the paged KV cache and the step loop. Imports nothing of `router`."""
