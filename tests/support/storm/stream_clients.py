"""Keeps a number of streams busy until SIGTERM, and logs what each of them saw. It judges nothing.

python -m storm.stream_clients JSON: endpoints, streams, log, seed, patience_s, backoff_s, json_share, and reference (a
file, of a model: the requests, and their answers; or nothing).
"""

import asyncio
import json
import random
import signal
import string
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO

from constraints import JSON_FORMS
from live.oracle import Oracle
from storm.reference import LENGTHS, RecordedAnswers, Request, draw_request
from storm.stream_log import LoggedReceiver, StreamLine, params_of

from octavo.client import AsyncClient, RetryPolicy, SamplingParams
from octavo.request.errors import ServingError

STREAMS_PER_CLIENT = 10
LEAVERS, READERS = 0.05, 0.05  # shares of the streams that leave early, and that a second client reads, too
STOPS = 0.3  # the share of all requests that end at one of many stop strings, if their text has it
NEVER = ("\n\nUser:", "<|end|>")  # stop strings that no text has, though it may have their beginnings
MOST_STOPS = 16
ENOUGH_TO_READ = 20
STATUS_INTERVAL_S = 2.0


class StreamClients:
    """One stream after another in each of `num_streams` places."""

    def __init__(self, arguments: SimpleNamespace, log: IO[str]) -> None:
        self._patience_s: float = arguments.patience_s
        self._random = random.Random(arguments.seed)
        self._json_share: float = arguments.json_share
        self._recorded = RecordedAnswers(Path(arguments.reference)) if arguments.reference else None
        self._oracle = Oracle("witness")
        self._log = log
        self._stopping = asyncio.Event()
        self._num_streams = 0
        self._num_ended = 0
        self._num_retries = 0
        self._num_tokens = 0
        policy = RetryPolicy(
            progress_timeout_s=arguments.patience_s,
            backoff_cap_s=arguments.backoff_s,
            retry_ratio=1.0,
            min_retries=1000,
            on_retry=self._note_retry,
        )
        num_clients = -(-arguments.streams // STREAMS_PER_CLIENT)
        self._clients = [AsyncClient(arguments.endpoints, policy=policy) for _ in range(num_clients)]
        self._places = arguments.streams

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        """Until `stop`, and then until the streams that run have ended."""
        status = asyncio.create_task(self._print_status())
        await asyncio.gather(*(self._keep_streaming(place) for place in range(self._places)))
        status.cancel()
        for client in self._clients:
            await client.close()

    def _note_retry(self, error: ServingError, since: float) -> None:
        self._num_retries += 1

    async def _print_status(self) -> None:
        """For the one who reads: streams, tokens, retries so far."""
        while True:
            print(self._num_ended, self._num_tokens, self._num_retries, flush=True)
            await asyncio.sleep(STATUS_INTERVAL_S)

    async def _keep_streaming(self, place: int) -> None:
        client = self._clients[place % len(self._clients)]
        await asyncio.sleep(self._random.uniform(0, 3))
        while not self._stopping.is_set():
            prompt, sampling = self._draw(place)
            if self._json_share and self._random.random() < self._json_share:
                form, seed = self._random.choice(JSON_FORMS), self._random.randrange(2**63)
                length = 2 * self._random.choice(LENGTHS)
                sampling = SamplingParams(temperature=1.0, seed=seed, n=2, constraint=form, max_tokens=length)
            elif self._random.random() < STOPS and not (self._recorded and sampling.ranked):
                sampling = replace(sampling, stop=self._stops(prompt, sampling))
            leaves = self._random.random() < LEAVERS
            reader = None
            line = self._line("leaver" if leaves else "own", prompt, sampling)
            if not leaves and self._random.random() < READERS:
                reader = asyncio.create_task(self._read_as_well(client, line))
            await self._follow(client, line, self._random.randrange(1, 40) if leaves else None)
            if reader is not None:
                await reader

    def _draw(self, place: int) -> Request:
        if self._recorded is not None:
            return self._recorded.draw(self._random)
        return draw_request(self._random, self._oracle, place)

    def _stops(self, prompt: list[int], sampling: SamplingParams) -> tuple[str, ...]:
        """Pieces of the text that the request would have without stop strings, and some that never come. Of a beam
        search, whose text depends on them, single characters."""
        if sampling.beam_width:
            return tuple(self._random.sample(string.ascii_letters, MOST_STOPS))
        text = "".join(output.text for output in (self._recorded or self._oracle).outputs(prompt, sampling))
        pieces = {text[at : at + self._random.randint(1, 4)] for at in range(len(text) // 3, len(text))}
        found = sorted(piece for piece in pieces if piece and "\ufffd" not in piece)
        return (*self._random.sample(found, min(len(found), MOST_STOPS - len(NEVER))), *NEVER)

    def _line(self, mode: str, prompt: list[int], sampling: SamplingParams, request_id: str = "") -> StreamLine:
        self._num_streams += 1
        return StreamLine(self._num_streams, request_id, mode, time.monotonic(), prompt, params_of(sampling))

    async def _read_as_well(self, client: AsyncClient, other: StreamLine) -> None:
        while len(other.events) < ENOUGH_TO_READ and not other.ended:
            await asyncio.sleep(0.1)
        if other.events and not other.ended:
            await self._follow(client, self._line("reader", other.prompt, other.sampling, other.request_id))

    async def _follow(self, client: AsyncClient, line: StreamLine, leave_after: int | None = None) -> None:
        if line.mode == "reader":
            stream = client.attach(line.request_id)
        else:
            stream = client.generate(line.prompt, line.sampling)
            line.request_id = stream.request_id
        stream._receiver = LoggedReceiver(line, line.sampling.n)  # the only way to see what came over the wire
        try:
            async with stream:
                async for event in stream:
                    self._num_tokens += len(event.token_ids)
                    if leave_after is not None and len(line.events) >= leave_after:
                        break
        except ServingError as error:
            line.error, line.message = error.reason, str(error)
        line.ended = time.monotonic()
        if line.mode == "own":
            await self._note_record(client, line)
        self._num_ended += 1
        self._log.write(line.to_json() + "\n")
        self._log.flush()

    async def _note_record(self, client: AsyncClient, line: StreamLine) -> None:
        until = time.monotonic() + self._patience_s
        while True:
            try:
                status = await client.get(line.request_id)
            except ServingError as error:
                if error.retryable and time.monotonic() < until:
                    continue
                line.record = {"error": error.reason}
                return
            timeline = [f"{entry.after_ms} {entry.what} {entry.detail}" for entry in status.timeline]
            told = line.error or status.state != "DONE" or line.sampling.constraint
            line.record = {"state": status.state, "lengths": status.num_tokens, "epoch": status.epoch}
            line.record |= {"finishes": [int(reason) for reason in status.finish_reasons]}
            line.record |= {"output_tokens": status.usage.output_tokens, "timeline": timeline if told else []}
            return


async def main() -> None:
    arguments = SimpleNamespace(**json.loads(sys.argv[1]))
    with open(arguments.log, "a", encoding="utf-8") as log:
        clients = StreamClients(arguments, log)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, clients.stop)
        await clients.run()


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(asyncio.run(main()))
