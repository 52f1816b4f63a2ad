"""A group of two hosts, which are two processes on loopback: what the front is sent in a step, and what a move costs.

    PYTHONPATH=tests/support python tests/bench/hosts.py FOLDER [steps | moves | both] [rounds] [MBIT]

With MBIT, as root, the other process is in a network namespace, behind a link of so many Mbit/s.

Random weights, a vocabulary of 128,256 tokens: steps of 16 and of 64 sequences, greedy and with others (see SAMPLED),
between two stages and between two ranks. Then blocks of 4096 tokens of the shape of Llama 3 8B, which the front has
been sent by another worker, on their way to the other host before the next step. Bytes are those of the connection of
columns, by TCP_INFO.
"""

import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _random_checkpoint import LLAMA, SHAPES, SIZES, write_checkpoint
from live.network_hosts import NetworkHosts, run

from gpu_worker import LLM, SamplingParams
from gpu_worker.group.group_runner import GroupRunner
from gpu_worker.group.hosts.host_streams import HostPlace, meet_hosts
from gpu_worker.group.loading import load_group
from octavo.wire.endpoint import Endpoint

SHAPES["steps"] = LLAMA | dict(zip(SIZES, (512, 1536, 4, 8), strict=True))
SHAPES["move"] = LLAMA | dict(zip(SIZES, (512, 512, 32, 8), strict=True)) | {"head_dim": 128, "vocab_size": 49152}
OPTIONS: dict[str, Any] = {"threads": 1, "block_size": 16, "swap_bytes": 0, "max_batch_tokens": 2048}
OPTIONS |= {"max_batch_sequences": 64, "quantization": "q8"}
SAMPLED = {
    "greedy": {"temperature": 0.0},
    "top_k 50": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "all tokens": {"temperature": 0.8},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "the same, few likely ones": {"temperature": 0.05, "top_p": 0.9},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "greedy, 5 log probabilities": {"temperature": 0.0, "logprobs": 5},
    "all tokens, penalties": {"temperature": 0.8, "repetition_penalty": 1.1},
}
WAYS = {"two stages": (1, 2), "two ranks": (2, 1)}
MOVED = 4096  # tokens
MBIT = int(sys.argv[4]) if len(sys.argv) > 4 else 0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def slow_link() -> NetworkHosts:
    """To a network namespace, at MBIT in both directions."""
    hosts = NetworkHosts(Path("/tmp"))
    hosts.start()
    shape = f"root tbf rate {MBIT}mbit burst 1mb latency 50ms"
    run(f"tc qdisc add dev oct{os.getpid() % 250 + 1}h0 {shape}")
    run(*hosts.hosts[0].command(f"tc qdisc add dev outside {shape}".split()))
    return hosts


class Pair:
    def __init__(self, folder: Path, way: str, **options: Any) -> None:
        address, command = "127.0.0.2", [sys.executable, "-m", "gpu_worker", "--launcher", "torchrun", "--insecure"]
        self._link = slow_link() if MBIT else None
        if self._link is not None:
            prefix = os.getpid() % 250 + 1
            address, command = f"10.213.{prefix}.101", self._link.hosts[0].command(command)
        with socket.create_server((address, 0)) as probe:
            port = probe.getsockname()[1]
        place = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": "1"}
        self._follower = subprocess.Popen(command, env=os.environ | place, stderr=subprocess.DEVNULL)
        streams = meet_hosts(HostPlace(0, 2, Endpoint(address, port)), None)
        self._stream = streams.columns[1]
        ranks, stages = WAYS[way]
        given = {**OPTIONS, **options}
        self.runner: GroupRunner = load_group(
            str(folder), ranks=ranks, stages=stages, streams=streams, patience_s=60.0, **given
        )

    def bytes(self) -> tuple[int, int]:
        """That were sent, and that came."""
        sent, came = struct.unpack_from("=QQ", self._stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 120)
        return sent, came

    def processor_s(self) -> float:
        """Of this process and the other host's rank."""
        children = Path(f"/proc/{self._follower.pid}/task").glob("*/children")
        ranks = [int(pid) for each in children for pid in each.read_text().split()]
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in ranks]
        return time.process_time() + TICK_S * sum(int(each[11]) + int(each[12]) for each in fields)

    def close(self) -> None:
        self.runner.close()
        self._follower.wait(30)
        if self._link is not None:
            self._link.stop()


def noted(pair: Pair) -> list[tuple[int, float, int, int, float]]:
    """What will be known of steps: sequences, if they are all decodes, seconds, bytes that were sent and that came,
    and the processor's time until then."""
    seen: list[tuple[int, float, int, int, float]] = []
    step_of = pair.runner.run

    def note(step: Any, *rest: Any) -> Any:
        began, before = time.perf_counter(), pair.bytes()
        output = step_of(step, *rest)
        seconds, after = time.perf_counter() - began, pair.bytes()
        count = step.num_decodes if step.num_decodes == len(step.seats) else 0
        seen.append((count, seconds, after[0] - before[0], after[1] - before[1], pair.processor_s()))
        return output

    pair.runner.run = note  # type: ignore[method-assign]  # of this one pair, to look at its bytes around each step
    return seen


def steps(folder: Path, rounds: int) -> None:
    print("| between | sequences | sampled | bytes to the front | from it | shortest, ms | median | processor |")
    print("|---|---|---|---|---|---|---|---|")
    for way in WAYS:
        pair = Pair(folder, way, kv_cache_bytes=1 << 28)
        seen = noted(pair)
        llm = LLM(str(folder), runner=pair.runner, max_batch_tokens=2048, max_batch_sequences=64, prefix_caching=False)
        for count in (16, 64):
            for name, given in SAMPLED.items():
                seen.clear()
                params = SamplingParams(**given, seed=1, max_tokens=rounds + 4, ignore_eos=True)
                prompts = [{"prompt_token_ids": [(7 * i + j) % 9000 for j in range(16)]} for i in range(count)]
                llm.generate(prompts, params, use_tqdm=False)
                whole = [each for each in seen if each[0] == count]
                walls, sent, came = ([each[i] for each in whole] for i in (1, 2, 3))
                figures = f"{statistics.median(came):,.0f} | {statistics.median(sent):,.0f} | "
                figures += f"{1000 * min(walls):.1f} | {1000 * statistics.median(walls):.1f}"
                figures += f" | {1000 * (whole[-1][4] - whole[0][4]) / (len(whole) - 1):.1f}"
                print(f"| {way} | {count} | {name} | {figures} |", flush=True)
        pair.close()


def moves(folder: Path, rounds: int) -> None:
    print("\n| between | bytes of 4096 tokens | sent | shortest, ms | median | processor |\n|---|---|---|---|---|---|")
    for way in WAYS:
        pair = Pair(folder, way, kv_cache_bytes=1 << 30, kv_cache_dtype="bfloat16")
        runner, memory = pair.runner._runner, pair.runner.block_memory
        blocks, walls, sent, processor = range(MOVED // 16), [], [], []
        data = os.urandom(memory.bytes_per_block)
        for _ in range(rounds):
            for block in blocks:
                place, rest = memory.open_block(block), memoryview(data)
                for part in place:
                    part[:], rest = rest[: len(part)], rest[len(part) :]
                memory.keep_block(block)
                memory.close_block(block)
            began, before, used = time.perf_counter(), pair.bytes()[0], pair.processor_s()
            runner.mirror(list(blocks))
            walls.append(time.perf_counter() - began)
            time.sleep(0.5)  # until the last bytes are acknowledged
            sent.append(pair.bytes()[0] - before)
            processor.append(pair.processor_s() - used)
        whole = memory.bytes_per_block * len(blocks)
        times = " | ".join(
            f"{1000 * x:.0f}" for x in (min(walls), statistics.median(walls), statistics.median(processor))
        )
        print(f"| {way} | {whole:,} | {statistics.median(sent):,.0f} | {times} |", flush=True)
        pair.close()


def main() -> None:
    directory, rounds = Path(sys.argv[1]), int(sys.argv[3]) if len(sys.argv) > 3 else 24
    what = sys.argv[2] if len(sys.argv) > 2 else "both"
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)
    if what in ("both", "steps"):
        steps(write_checkpoint("steps", directory), rounds)
    if what in ("both", "moves"):
        moves(write_checkpoint("move", directory), 5)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
