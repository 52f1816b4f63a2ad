"""The sides of peers.py: octavo's service with different weights and ops, and what it is compared with.

All take the same texts in the same closed loop and are asked for the same number of tokens, greedy, on all cores. Only
the side being measured runs; the processes of the others are stopped meanwhile.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Protocol

import psutil
from _llama_cpp import programs
from _service import free_port, service, start, until_ready
from _transformers import Peer

from octavo.client import AsyncClient
from octavo.request.sampling import SamplingParams

START_S = 600.0  # vLLM compiles for minutes
STOP_S = 30.0
HERE = Path(__file__).parent


FRESH = itertools.count()
STORIES = itertools.count(1000)  # of as many tokens, for ever so long


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop: so many streams, each beginning its next request when one ends."""

    name: str
    streams: int
    requests: int
    shared_words: int = 0
    fresh: bool = False  # what is shared has never been seen: nobody's cache has it before the loop begins
    long_words: int = 0  # each prompt has so many words that no other begins with, and one token is asked for

    def prompts(self) -> list[str]:
        """Other stories at each call, so that nobody has seen more of them than what they share."""
        if self.long_words:
            fox = "The quick brown fox jumps over the lazy dog. " * (self.long_words // 9)
            return [f"{next(STORIES)} cats. {fox}" for _ in range(self.requests)]
        shared = "The quick brown fox jumps over the lazy dog. " * (self.shared_words // 9)
        if self.fresh:
            shared = f"Number {next(FRESH)}. {shared}"
        story = "Write a short story number {} about a cat who travels to a city far away and meets friends there. "
        return [shared + story.format(next(STORIES)) for _ in range(self.requests)]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request."""

    first_s: float
    tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What a side brought under one load."""

    tokens: int  # of prompts, where these are what is measured
    seconds: float
    first_s: float  # median time to the first token

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Side(Protocol):
    """One server under test."""

    name: str

    async def start(self) -> None: ...
    async def run(self, load: Load, num_tokens: int) -> Figures: ...
    async def stop(self) -> None: ...


Request = Callable[[str, int], Awaitable[Answer]]  # of a text, and of how many tokens


async def closed_loop(request: Request, load: Load, num_tokens: int) -> Figures:
    """One request first, alone, as warm-up: what prompts share is known to whoever keeps it, unless it is fresh."""
    gate = asyncio.Semaphore(load.streams)

    async def one(prompt: str) -> Answer:
        async with gate:
            return await request(prompt, 1 if load.long_words else num_tokens)

    prompts = load.prompts()
    await one(load.prompts()[0])
    began = time.perf_counter()
    answers = await asyncio.gather(*map(one, prompts))
    seconds = time.perf_counter() - began
    tokens = sum(answer.prompt_tokens if load.long_words else answer.tokens for answer in answers)
    return Figures(tokens, seconds, median(answer.first_s for answer in answers))


class Processes:
    """Those a side has started, with all their descendants; each in a session of its own (see `start`)."""

    def __init__(self) -> None:
        self._before = set(psutil.Process().children())
        self._started: set[psutil.Process] = set()

    def note(self) -> None:
        self._started = set(psutil.Process().children()) - self._before

    def signal(self, number: signal.Signals) -> None:
        for process in self._started:
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in (process, *process.children(recursive=True)):
                    each.send_signal(number)


class Octavo:
    """A store, a router and a worker; a client over gRPC."""

    def __init__(self, name: str, *worker_args: str, program: Sequence[str] = ("-m", "gpu_worker")) -> None:
        self.name = name
        self._args = ("--model", "smollm2", "--device", "cpu", *worker_args)
        self._program = program
        self._stack = AsyncExitStack()
        self._client: AsyncClient | None = None
        self._processes = Processes()

    async def start(self) -> None:
        self._processes = Processes()
        self._client = await self._stack.enter_async_context(service(*self._args, program=self._program))
        self._processes.note()
        self._processes.signal(signal.SIGSTOP)

    async def run(self, load: Load, num_tokens: int) -> Figures:
        client = self._client
        assert client is not None
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)

        async def request(prompt: str, count: int) -> Answer:
            began, first, tokens, prompt_tokens = time.perf_counter(), 0.0, 0, 0
            async for event in client.generate(prompt, replace(params, max_tokens=count)):
                first = first or time.perf_counter() - began
                tokens += len(event.token_ids)
                prompt_tokens = event.finished.usage.prompt_tokens if event.finished else 0
            return Answer(first, tokens, prompt_tokens)

        self._processes.signal(signal.SIGCONT)
        await until_ready(client, 60)  # its leases ended while it was stopped
        try:
            return await closed_loop(request, load, num_tokens)
        finally:
            self._processes.signal(signal.SIGSTOP)

    async def stop(self) -> None:
        self._processes.signal(signal.SIGCONT)
        await self._stack.aclose()


class Float32(Octavo):
    """The demo model's weights as transformers computes with them: float32, four bytes each."""

    def __init__(self) -> None:
        super().__init__("octavo, float32")
        self._folder = tempfile.TemporaryDirectory()

    async def start(self) -> None:
        await asyncio.to_thread(Peer("float32").save, Path(self._folder.name))
        self._args = ("--model", self._folder.name, "--device", "cpu", "--quantization", "none")
        await super().start()

    async def stop(self) -> None:
        await super().stop()
        self._folder.cleanup()


class Server:
    """One with an OpenAI-compatible API; a client over HTTP, one connection per request."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._port = free_port()
        self._command = [part.replace("PORT", str(self._port)) for part in command]
        self._environment = {**os.environ, **environment}
        self._processes = Processes()
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        quiet = asyncio.subprocess.DEVNULL
        self._processes = Processes()
        self._process = await start(*self._command, env=self._environment, stdout=quiet, stderr=quiet)
        self._processes.note()
        until = time.monotonic() + START_S
        while True:
            try:
                await self._request("Hi", 2)
                break
            except (OSError, asyncio.IncompleteReadError) as error:
                if self._process.returncode is not None or time.monotonic() > until:
                    raise RuntimeError(f"{self.name} does not start: {' '.join(self._command)}") from error
                await asyncio.sleep(0.5)
        self._processes.signal(signal.SIGSTOP)

    async def run(self, load: Load, num_tokens: int) -> Figures:
        self._processes.signal(signal.SIGCONT)
        try:
            return await closed_loop(self._request, load, num_tokens)
        finally:
            self._processes.signal(signal.SIGSTOP)

    async def stop(self) -> None:
        """And whatever it has started, however it ends."""
        if self._process is None:
            return
        self._processes.signal(signal.SIGCONT)
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def _request(self, prompt: str, num_tokens: int) -> Answer:
        """HTTP/1.0, so that the answer comes without chunks and ends with the connection."""
        body = {"model": "x", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        began, first, usage = time.perf_counter(), 0.0, {}
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(head.encode() + data)
            if b" 200 " not in await reader.readline():
                raise ConnectionError(f"{self.name}: {(await reader.read()).decode()}")
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if event.get("choices"):
                        first = first or time.perf_counter() - began
                    usage = event.get("usage") or usage
        finally:
            writer.close()
        if usage.get("completion_tokens") != num_tokens:
            raise ConnectionError(f"{self.name}: {usage.get('completion_tokens')} tokens, not {num_tokens}")
        return Answer(first, num_tokens, usage["prompt_tokens"])


def llama_cpp(folder: Path, model: Path, streams: int) -> Server:
    """Its prompt cache as it comes: a slot begins with what it has in common with its last request."""
    binaries = programs(folder)
    cores = str(os.cpu_count())
    slots = ("-np", str(streams), "-c", str(streams * 2048))
    command = (str(binaries / "llama-server"), "-m", str(model), "--host", "127.0.0.1", "--port", "PORT", "-t", cores)
    return Server("llama.cpp", (*command, *slots), {"LD_LIBRARY_PATH": str(binaries)})


def vllm_cpu(folder: Path, model: Path, dtype: str) -> Server:
    """Its prefix cache is on; the weights of the file, dequantized."""
    command = (str(folder / "bin" / "vllm"), "serve", str(model), "--served-model-name", "x", "--dtype", dtype)
    limits = ("--max-model-len", "2048", "--max-num-seqs", "64", "--host", "127.0.0.1", "--port", "PORT")
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(os.cpu_count()),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Server(f"vLLM-CPU {dtype}", (*command, *limits), environment)


class Transformers:
    """`generate` in this process: static batches as large as the streams, nothing over a network."""

    name = "transformers fp32"

    async def start(self) -> None:
        self._peer = Peer("float32")

    async def run(self, load: Load, num_tokens: int) -> Figures:
        texts = load.prompts()
        began = time.perf_counter()
        for first in range(0, len(texts), load.streams):
            await asyncio.to_thread(self._peer.generate, texts[first : first + load.streams], num_tokens)
        return Figures(len(texts) * num_tokens, time.perf_counter() - began, float("nan"))

    async def stop(self) -> None:
        pass


def reference() -> Octavo:
    """The service on the ops in plain torch, as where the extension was not built."""
    return Octavo("octavo, reference ops", program=(str(HERE / "_reference_worker.py"),))
