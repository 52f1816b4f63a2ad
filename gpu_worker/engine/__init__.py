"""The step loop: plan, run, commit; how long steps take; and what a worker's settings come to."""

from pathlib import Path

# gpu_worker.engine.arg_utils, .async_llm_engine and .llm_engine, which programs written for vLLM import.
__path__.append(str(Path(__file__).parent.with_name("offline") / "vllm" / "engine"))
