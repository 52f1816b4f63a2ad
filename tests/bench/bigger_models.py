"""Bigger models on a CPU: tokens/s, prompts, memory and starts, of octavo and of peers in turns.

    bigger_models.py [--folder DIR] [--shapes qwen2.5-0.5b ...] [--formats q4 bf16 q4_k_m awq int8 ...] [--rounds 2]
        [--short] [--peer NAME FORMATS COMMAND]   (FORMATS: q4,bf16; COMMAND: with {port}, {folder}, {shape}, {format})

Writes checkpoints with random weights (of q4_k_m a GGUF file, {folder}/{shape}-q4_k_m.gguf; of codes and fp8 a folder,
{folder}/{shape}-{format}; of a mixture {folder}/{shape}.gguf, by the format `mixture`) below DIR, a few GB, and leaves
them there. One server runs at a time, and greedily: octavo without guesses of tokens, as texts of random weights
repeat. A peer is a shell command that serves OpenAI's HTTP API on {port} of 127.0.0.1 until SIGTERM. A start is the
time from the command to the first token; octavo's first one has an empty folder of packed weights, its second one what
the first left.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import psutil
from _random_checkpoint import SHAPES, write_checkpoint
from _random_codes import FORMS, write_codes
from _random_gguf import write_q4_k_m
from _random_mixtures import MIXTURES, write_mixture
from _service import describe_machine, free_port, post

FORMATS = {
    "q4": ["--quantization", "q4"],
    "bf16": ["--dtype", "bfloat16", "--quantization", "none"],
    "q4_k_m": [],
    "mixture": [],
    **{form: [] for form in FORMS},
}
WRITERS = {"q4_k_m": write_q4_k_m, "mixture": write_mixture} | {form: partial(write_codes, form) for form in FORMS}
HTTP_OFFSET = 8000  # of a router of `octavo up`, from its gRPC port
LONGEST_START_S = 900
WORDS = ("the", "cat", "sat", "on", "a", "big", "red", "mat", "with", "many", "old", "friends", "near", "blue", "water")
Row = dict[str, float]


@dataclass(frozen=True)
class Server:
    url: str
    model: str
    process: psutil.Process
    start_s: float

    def complete(self, prompt: str, tokens: int) -> Mapping[str, int]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        with post(f"{self.url}/v1/completions", body) as answer:
            usage: Mapping[str, int] = json.load(answer)["usage"]
        return usage

    def memory(self) -> Row:
        """MB of all processes of the server; of pages that several have, `pss` counts each one's share."""
        row = {"rss": 0.0, "pss": 0.0}
        for process in (self.process, *self.process.children(recursive=True)):
            with suppress(psutil.Error):
                full = process.memory_full_info()
                row["rss"] += full.rss / 1e6
                row["pss"] += full.pss / 1e6
        return row


@contextmanager
def serving(command: list[str], port: int, log: Path) -> Iterator[Server]:
    began = time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        yield Server(url, _first_token(url, process, log), psutil.Process(process.pid), time.perf_counter() - began)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _first_token(url: str, process: "subprocess.Popen[bytes]", log: Path) -> str:
    """The name of the model that is served, once it has made a token."""
    until = time.monotonic() + LONGEST_START_S
    while time.monotonic() < until and process.poll() is None:
        with suppress(OSError, ValueError, LookupError):
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
                name = str(json.load(answer)["data"][0]["id"])
            post(f"{url}/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1}).close()
            return name
        time.sleep(0.05)
    raise SystemExit(f"the server did not start: {log} says why\n{log.read_text(errors='replace')[-1500:]}")


def measured(server: Server, salt: str, *, is_short: bool = False) -> Row:
    """Tokens/s of 1 and 16 streams, prompt tokens/s of unseen prompts, and memory. Short: half a minute at most."""
    row = {"start": server.start_s}
    tokens_each = 48 if is_short else 64
    for streams, requests in ((1, 1), (16, 16)) if is_short else ((1, 3), (16, 32)):
        prompts = [f"{salt} {streams} {i}: write a story about a cat who travels far away" for i in range(requests)]
        with ThreadPoolExecutor(streams) as pool:
            list(pool.map(lambda prompt: server.complete(f"warm {prompt}", 8), prompts[:streams]))
            began = time.perf_counter()
            usages = pool.map(lambda prompt: server.complete(prompt, tokens_each), prompts)
            row[f"tok/s at {streams}"] = sum(each["completion_tokens"] for each in usages) / (
                time.perf_counter() - began
            )
    for words in (450,) if is_short else (500, 1700):
        rates = []
        for i in range(2 if is_short else 3):
            choose = random.Random(f"{salt}{words}{i}")
            prompt = " ".join(choose.choice(WORDS) for _ in range(words))
            began = time.perf_counter()
            usage = server.complete(prompt, 1)
            rates.append(usage["prompt_tokens"] / (time.perf_counter() - began))
        row[f"prompt of {words}"] = statistics.median(rates)
    return row | server.memory()


def octavo_row(source: Path, format_: str, scratch: Path, salt: str, more: list[str], *, is_short: bool) -> Row:
    cache = scratch / "packed"
    shutil.rmtree(cache, ignore_errors=True)
    row: Row = {}
    for which in ("first", "second"):
        port, state = free_port() % 20000 + 20000, scratch / f"state-{which}"
        program = [str(Path(sys.executable).with_name("octavo")), "up", "--workers", "1", "--grpc-port", str(port)]
        model = ["--model", str(source), "--state-dir", str(state), "--packed-cache", str(cache)]
        command = [*program, *model, "--speculation", "off", *FORMATS[format_], *more]
        with serving(command, port + HTTP_OFFSET, scratch / f"{which}.log") as server:
            row = {f"{which} start": server.start_s, f"{which} load": load_s(state)} | row
            if which == "second":
                row |= measured(server, salt, is_short=is_short)
        shutil.rmtree(state, ignore_errors=True)
    row.pop("start")
    return row


def load_s(state: Path) -> float:
    """What loading the model took, without imports, by the worker's log."""
    texts = [path.read_text(errors="replace") for path in state.rglob("*.log")]
    found = re.search(r"loaded in ([\d.]+) s", "\n".join(texts))
    return float(found[1]) if found else float("nan")


def peer_row(command: str, shape: str, format_: str, folder: Path, scratch: Path, salt: str, *, is_short: bool) -> Row:
    port = free_port()
    filled = command.format(port=port, folder=folder, shape=shape, format=format_)
    with serving(["bash", "-c", f"exec {filled}"], port, scratch / "peer.log") as server:
        return measured(server, salt, is_short=is_short)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "octavo-bench-models")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, *MIXTURES], default=["qwen2.5-0.5b"])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["q4", "bf16", "q4_k_m"])
    parser.add_argument("--short", action="store_true", help="fewer and shorter requests, and prompts of 450 words")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peer", nargs=3, action="append", default=[], metavar=("NAME", "FORMATS", "COMMAND"))
    parser.add_argument("--octavo", default="", help="further arguments of `octavo up`")
    options = parser.parse_args()
    for shape, format_ in product(options.shapes, options.formats):
        if (shape in MIXTURES) != (format_ == "mixture"):
            shapes = ", ".join(MIXTURES)
            parser.error(f"{shape} is not written as {format_}: give --formats mixture for {shapes}, and only there")
    print(describe_machine(), flush=True)
    for shape in options.shapes:
        for format_ in options.formats:
            source = WRITERS.get(format_, write_checkpoint)(shape, options.folder)
            sides: dict[str, Callable[[Path, str], Row]] = {
                "octavo": partial(octavo_row, source, format_, more=options.octavo.split(), is_short=options.short)
            }
            for name, formats, command in options.peer:
                if format_ in formats.split(","):
                    sides[name] = partial(peer_row, command, shape, format_, options.folder, is_short=options.short)
            for number in range(options.rounds):
                for name, run in sides.items():
                    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
                        row = run(Path(scratch), f"{number}{name}")
                    figures = ", ".join(f"{figure} {value:.4g}" for figure, value in row.items())
                    print(f"{shape} {format_} {name}: {figures} (load {os.getloadavg()[0]:.1f})", flush=True)


if __name__ == "__main__":
    main()
