"""What sampling costs: microseconds per row for each kind of request, by the reference and by the extension.

Run: PYTHONPATH=. OMP_NUM_THREADS=2 python tests/bench/sampler.py
"""

import argparse
import os
import time
from collections.abc import Callable

import torch

from gpu_worker.ops import choose_ops
from gpu_worker.sampling.native_sampler import choose_sampler
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.steps.seats import Seat
from octavo.request.sampling import SamplingParams

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "top-k 50": SamplingParams(temperature=0.8, top_k=50),
    "top-k 50, top-p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "min-p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "penalties, greedy": SamplingParams(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.2),
    "logprobs 5, greedy": SamplingParams(temperature=0.0, logprobs=5),
}


def branches_of(kinds: list[SamplingParams], num_rows: int, num_tokens: int, vocab_size: int) -> list[Seat]:
    branches = []
    for seed in range(num_rows):
        params = kinds[seed % len(kinds)]
        tokens = torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
        with_seed = SamplingParams(**{name: getattr(params, name) for name in params.__slots__} | {"seed": seed})
        branches.append(Seat(with_seed, tokens + tokens[: num_tokens // 4], num_tokens))
    return branches


def microseconds(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2] * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 48])
    parser.add_argument("--context", type=int, default=1024, help="tokens of the prompt, for penalties")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    cpu = torch.device("cpu")
    print(f"{choose_ops(cpu).name}, load {os.getloadavg()[0]:.1f}; torch on {torch.get_num_threads()} thread")
    print(f"vocabulary {options.vocab_size}, median of {options.repeats}, us per row: reference, extension")
    for shape, flatness in (("peaked", 1.0), ("flat", 8.0)):
        for num_rows in options.rows:
            # A Zipf-like fall with noise: at 1.0 like a small model in running text, at 8.0 close to uniform.
            ranks = torch.rand(num_rows, options.vocab_size, generator=generator).argsort(dim=-1).float()
            logits = -1.5 * torch.log1p(ranks) / flatness
            cases = {name: [params] for name, params in KINDS.items()} | {"one of each": list(KINDS.values())}
            for name, kinds in cases.items():
                if name == "one of each" and num_rows == 1:
                    continue
                branches = branches_of(kinds, num_rows, options.context, options.vocab_size)
                rows = list(range(num_rows))
                costs = []
                for sampler in (
                    Sampler(options.vocab_size, "cpu", (0,)),
                    choose_sampler(options.vocab_size, cpu, (0,)),
                ):
                    call = lambda s=sampler, b=branches, x=logits, r=rows: s.sample(x, r, b)  # noqa: E731
                    costs.append(microseconds(call, options.repeats) / num_rows)
                print(f"{shape:7s} {num_rows:3d} rows  {name:22s} {costs[0]:9.1f} {costs[1]:9.1f}")


if __name__ == "__main__":
    main()
