"""T5, BART and Whisper in the shapes of published ones: tokens/s and prompts of octavo, and of CTranslate2 in turns.

    encoders.py [--folder DIR] [--shapes t5-base ...] [--peer PYTHON] [--compute-types int8 float32] [--rounds 3]
        [--octavo='--dtype bfloat16' ...]

Random weights, which stay below DIR. octavo is `octavo up` with one worker, through gRPC; CTranslate2 is its library
in a process of its own, in PYTHON, which also converts (it needs torch and transformers): it gets all streams as one
batch, and no server is between. Both make 64 tokens of each stream greedily, of prompts of 200 tokens, or of half a
minute of sound, at 1 and 16 streams. A prompt of 450 tokens, or a sound, has one token of output. Nobody has seen it
before.
"""

import argparse
import array
import asyncio
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from _random_encoders import ENGLISH, NO_TIMES, SHAPES, START, TRANSCRIBE, write_encoder
from _service import describe_machine, free_port

from octavo.client import AsyncClient, SamplingParams, Speech

TOKENS, PROMPT, LONG_PROMPT, RATE, SECONDS = 64, 200, 450, 16_000, 30
CONVERT = (
    "import sys; from ctranslate2.converters import TransformersConverter as C; C(sys.argv[1]).convert(sys.argv[2])"
)
Row = dict[str, float]


def sound(rng: random.Random) -> list[float]:
    return np.random.default_rng(rng.randrange(1 << 30)).normal(0, 0.1, RATE * SECONDS).clip(-1, 1).tolist()


def wav(samples: list[float]) -> bytes:
    data = array.array("h", [round(each * 32767) for each in samples]).tobytes()
    form = struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)
    parts = b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(parts)) + b"WAVE" + parts


def prompts_of(shape: str, count: int, length: int, salt: str) -> list[Any]:
    rng = random.Random(f"{salt} {count} {length}")
    if shape == "whisper-base":
        return [sound(rng) for _ in range(count)]
    return [[rng.randrange(100, 30_000) for _ in range(length)] for _ in range(count)]


class Octavo:
    def __init__(self, shape: str, endpoint: str) -> None:
        self._shape, self._endpoint = shape, endpoint

    def run(self, prompts: list[Any], tokens: int) -> float:
        """How long it takes."""
        given = [Speech(wav(each), "en") for each in prompts] if self._shape == "whisper-base" else prompts
        return asyncio.run(self._run(given, tokens))

    async def _run(self, prompts: list[Any], tokens: int) -> float:
        how = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        async with AsyncClient(self._endpoint) as client:
            await client.connect(300)
            began = time.perf_counter()
            answers = await asyncio.gather(*(client.complete(each, how) for each in prompts))
            took = time.perf_counter() - began
        assert all(each.usage.output_tokens == tokens for each in answers)
        return took


class Peer:
    def __init__(
        self, shape: str, process: "subprocess.Popen[str]", scratch: Path, vocabulary: Mapping[str, int]
    ) -> None:
        self._shape, self._process, self._scratch = shape, process, scratch
        self._names = {i: name for name, i in vocabulary.items()}
        self._extract = transformers.WhisperFeatureExtractor()

    def run(self, prompts: list[Any], tokens: int) -> float:
        if self._shape == "whisper-base":
            made = self._extract(prompts, sampling_rate=RATE, return_tensors="np").input_features
            np.save(self._scratch / "features.npy", made)
            asked: dict[str, Any] = {"features": str(self._scratch / "features.npy")}
        else:
            asked = {"prompts": [[self._names[token] for token in each] for each in prompts]}
        print(json.dumps(asked | {"tokens": tokens}), file=self._process.stdin, flush=True)
        told = json.loads(self._process.stdout.readline())
        assert set(told["lengths"]) <= {tokens, max(tokens, 2)}, told["lengths"]  # it writes no single token of a sound
        return float(told["seconds"])


def measured(side: Any, shape: str, salt: str) -> Row:
    row = {}
    for streams in (1, 16):
        side.run(prompts_of(shape, streams, PROMPT, f"warm {salt}"), 8)
        took = side.run(prompts_of(shape, streams, PROMPT, salt), TOKENS)
        row[f"tok/s at {streams}"] = streams * TOKENS / took
    times = [side.run(prompts_of(shape, 1, LONG_PROMPT, f"{salt} {i}"), 1) for i in range(3)]
    row["first token, ms"] = statistics.median(times) * 1000
    return row


@contextmanager
def octavo(shape: str, folder: Path, scratch: Path, more: list[str]) -> Iterator[Octavo]:
    port = free_port() % 20000 + 20000
    program = [str(Path(sys.executable).with_name("octavo")), "up", "--workers", "1", "--grpc-port", str(port)]
    state = Path(tempfile.mkdtemp(dir=scratch))
    with (state / "log").open("wb") as log:
        command = [*program, "--model", str(folder), "--state-dir", str(state), "--speculation", "off", *more]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield Octavo(shape, f"127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait()


@contextmanager
def peer(shape: str, folder: Path, scratch: Path, python: str, compute_type: str) -> Iterator[Peer]:
    converted = folder.with_name(f"{shape}-ctranslate2")
    if not converted.exists():
        subprocess.run([python, "-c", CONVERT, str(folder), str(converted)], check=True)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    start = json.dumps([START, ENGLISH, TRANSCRIBE, NO_TIMES])
    command = [
        python,
        str(Path(__file__).with_name("_ctranslate2_side.py")),
        str(converted),
        shape,
        compute_type,
        start,
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        print(f"{shape} CTranslate2 {compute_type}: {process.stdout.readline().strip()}", flush=True)
        yield Peer(shape, process, scratch, vocabulary)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "octavo-bench-models")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--peer", default="", help="a Python that has ctranslate2")
    parser.add_argument("--compute-types", nargs="+", default=["int8", "float32"])
    parser.add_argument("--octavo", action="append", default=[], help="further arguments of `octavo up`, of one side")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    for shape in options.shapes:
        folder = write_encoder(shape, options.folder)
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            scratch, sides = Path(name), dict[str, Any]()
            for more in options.octavo or [""]:
                sides[f"octavo {more}"] = stack.enter_context(octavo(shape, folder, scratch, more.split()))
            for compute_type in options.compute_types if options.peer else ():
                found = peer(shape, folder, scratch, options.peer, compute_type)
                sides[f"CTranslate2 {compute_type}"] = stack.enter_context(found)
            for number in range(options.rounds):
                for side, one in sides.items():
                    row = measured(one, shape, f"{number} {side}")
                    figures = ", ".join(f"{figure} {value:.4g}" for figure, value in row.items())
                    print(f"{shape} {side}: {figures} (load {os.getloadavg()[0]:.1f})", flush=True)


if __name__ == "__main__":
    main()
