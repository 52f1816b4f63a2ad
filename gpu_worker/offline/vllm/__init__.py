"""vLLM's names of modules: `gpu_worker` finds them beside its own (gpu_worker/__init__.py)."""
