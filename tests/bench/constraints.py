"""What a constraint costs: tokens/s and CPU time of the same streams, free and as JSON of a schema, in turns.

tests/bench/constraints.py --streams 16 --tokens 128 --rounds 5
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

from gpu_worker import LLM, SamplingParams, StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "member": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "member"],
}
PEOPLE = {
    "type": "array",
    "items": PERSON,
    "minItems": 50,
}  # longer than any output here


def measured(llm: LLM, prompts: list[str], params: SamplingParams) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {"tokens_per_s": num_tokens / wall, "cpu_ms_per_token": 1000 * cpu / num_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--speculation", default="off", help="auto: guessed tokens save steps of JSON")
    arguments = parser.parse_args()
    # Nothing is demoted to memory that the host of a virtual machine has to find first, at milliseconds a step.
    llm = LLM(arguments.model, speculation=arguments.speculation, swap_space=0)
    prompts = [f"A person named number {number} as JSON:" for number in range(arguments.streams)]
    usual: dict[str, Any] = {"max_tokens": arguments.tokens, "temperature": arguments.temperature}
    kinds = {
        "free": SamplingParams(**usual, ignore_eos=True),
        "JSON of a schema": SamplingParams(**usual, structured_outputs=StructuredOutputsParams(json=PEOPLE)),
    }
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for number in range(arguments.rounds + 1):
        for kind, params in sorted(kinds.items(), reverse=bool(number % 2)):
            # Another seed each time: of an output that was there before, all is guessed.
            figures = measured(llm, prompts, replace(params, seed=number))
            if number:  # the first round makes everything ready
                found[kind].append(figures)
                print(kind, json.dumps({name: round(value, 3) for name, value in figures.items()}), flush=True)
    for name in ("tokens_per_s", "cpu_ms_per_token"):
        free, bound = (statistics.median(each[name] for each in found[kind]) for kind in kinds)
        pairs = [bound[name] / free[name] for free, bound in zip(*found.values(), strict=True)]
        each = f"median of pairs {statistics.median(pairs):.3f} ({min(pairs):.3f} to {max(pairs):.3f})"
        print(f"{name}: {free:.3f} free, {bound:.3f} constrained, ratio {bound / free:.3f}, {each}")


if __name__ == "__main__":
    main()
