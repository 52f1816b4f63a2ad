"""A group of two ranks whose second host is an actor of a Ray cluster: python two_hosts.py MODEL.

Prints as JSON whether it says what one process says, and whether its rank is gone after the front has closed.
"""

import json
import sys
import time
from typing import Any

import ray
from guard.processes import exists

from gpu_worker import LLM, SamplingParams
from gpu_worker.group.hosts.launchers import streams_of
from gpu_worker.group.loading import load_group
from gpu_worker.running.loading import load_runner
from octavo.settings.worker import WorkerSettings

OPTIONS: dict[str, Any] = {
    "threads": 1,
    "block_size": 16,
    "kv_cache_bytes": 1 << 22,
    "swap_bytes": 0,
    "max_batch_tokens": 96,
    "max_batch_sequences": 16,
}
PROMPTS = ["A tale", "Another tale", "The end"]


def said(runner: Any, model: str) -> list[Any]:
    llm = LLM(model, runner=runner)
    params = SamplingParams(temperature=0, max_tokens=20)
    return [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, params, use_tqdm=False)]


def main() -> None:
    model = sys.argv[1]
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    settings = WorkerSettings(launcher="ray", tensor_parallel=2, hosts=2, insecure=True)
    group = load_group(model, ranks=2, streams=streams_of(settings), patience_s=20.0, **OPTIONS)
    same = said(group, model) == said(load_runner(model, **OPTIONS), model)
    pid = group.rank_states[1].pid
    group.close()
    until = time.monotonic() + 60
    while exists(pid) and time.monotonic() < until:
        time.sleep(0.1)
    print(json.dumps({"same": same, "gone": not exists(pid)}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
