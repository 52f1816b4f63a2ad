"""vLLM's names of modules: `gpu_worker.engine` finds them beside its own."""
