"""Clients with the real SDK, each with one stream after the other, and what each stream must have brought."""

import asyncio
import random
from dataclasses import dataclass

from live.history import History
from live.oracle import Expected, Oracle

from octavo.client import AsyncClient, Event, FinishReason, RetryPolicy, SamplingParams
from octavo.errors import PoisonSuspected, ServingError
from simulation.cluster import Cluster
from simulation.engine import POISON
from simulation.loop import Host

MAX_TOKEN = 900  # of prompts: below the poison


class Violation(Exception):
    """What must never happen has happened."""


@dataclass
class Request:
    """One stream: what is asked for, and what the client does meanwhile."""

    name: str
    prompt: list[int]
    params: SamplingParams
    behaviour: str  # "read", "cancel", "leave", "move" (another client attaches), "poison"
    after: int  # tokens after which the client does that


class Client:
    """One client on a machine of its own."""

    def __init__(self, cluster: Cluster, name: str, oracle: Oracle, num_streams: int) -> None:
        self._cluster = cluster
        self._log = cluster.log
        self._oracle = oracle
        self._num_streams = num_streams
        self.name = name
        self.host: Host = cluster.new_host(name)
        self.rng: random.Random = cluster.network.rng(f"client {name}")
        self.task: asyncio.Task[None] | None = None
        self.ended = 0
        self.longest_gap_s = 0.0

    def start(self) -> None:
        self.task = self.host.spawn(self._run())

    async def _run(self) -> None:
        policy = RetryPolicy(min_retries=10**6)
        async with AsyncClient(self._cluster.endpoints, policy=policy) as client:
            for number in range(self._num_streams):
                await asyncio.sleep(self.rng.uniform(0.0, 0.4))
                await self._stream(client, self._new_request(number))
                self.ended += 1

    def _new_request(self, number: int) -> Request:
        rng = self.rng
        prompt = [rng.randrange(1, MAX_TOKEN) for _ in range(rng.choice([1, 8, 15, 16, 17, 40]))]
        length, seed = rng.randrange(6, 44), rng.randrange(2**63)
        params = rng.choice(
            [
                SamplingParams(temperature=0.0, max_tokens=length),
                SamplingParams(temperature=0.0, max_tokens=length),
                SamplingParams(temperature=1.0, seed=seed, max_tokens=length),
                SamplingParams(temperature=0.8, seed=seed, n=2, max_tokens=length),
                SamplingParams(temperature=1.0, seed=seed, n=1, best_of=2, max_tokens=length),
            ]
        )
        behaviour = rng.choices(["read", "cancel", "leave", "move"], [8, 1, 1, 1])[0]
        return Request(f"{self.name}-{number}", prompt, params, behaviour, rng.randrange(0, length))

    async def _stream(self, client: AsyncClient, request: Request) -> None:
        history = History()
        size = f"{len(request.prompt)} + {request.params.max_tokens}"
        self._log.add(self.name, f"{request.name}: {request.behaviour}, {size}")
        try:
            complete = await self._read(client, request, history)
        except ServingError as error:
            self._judge_error(request, history, error)
            return
        except AssertionError as error:
            raise Violation(f"{request.name}: {error}") from error
        expected = self._expected(request)
        if complete and FinishReason.CANCELLED not in history.finishes.values():
            try:
                history.check(expected)
            except AssertionError as error:
                raise Violation(f"{request.name}: {error}: {history} and not {expected}") from error
        elif complete and request.behaviour != "cancel":
            raise Violation(f"{request.name}: cancelled, and nobody asked for it: {history}")
        self._check_prefix(request, history, expected)
        self._log.add(self.name, f"{request.name}: {'ended' if complete else 'left'}")

    async def _read(self, client: AsyncClient, request: Request, history: History) -> bool:
        """Reads the stream, and does what the request says. Returns whether the stream came to its end."""
        loop = asyncio.get_running_loop()
        stream = client.generate(request.prompt, request.params, request_id=request.name)
        num_tokens, last = 0, loop.time()
        async with stream:
            async for event in stream:
                history.add(event)
                num_tokens += len(event.token_ids)
                self.longest_gap_s = max(self.longest_gap_s, loop.time() - last)
                last = loop.time()
                self._note_event(request, event)
                if num_tokens > request.after and not history.ended:
                    if request.behaviour == "leave":
                        return False
                    if request.behaviour == "cancel":
                        await client.cancel(request.name)
                        request.after = 10**9
                    elif request.behaviour == "move":
                        return await self._move(request, history, stream.resume_token)
        return True

    async def _move(self, request: Request, history: History, resume_token: bytes) -> bool:
        """Goes on with another client, from the resume token."""
        async with AsyncClient(self._cluster.endpoints, policy=RetryPolicy(min_retries=10**6)) as other:
            async with other.attach(resume_token=resume_token) as stream:
                async for event in stream:
                    history.add(event)
                    self._note_event(request, event)
        return True

    def _note_event(self, request: Request, event: Event) -> None:
        end = event.finish_reason.name if event.finish_reason else ""
        place = f"{event.branch}.{event.first_index}"
        self._log.add(self.name, f"{request.name}: {place} {list(event.token_ids)} {end}")

    def _expected(self, request: Request) -> list[Expected]:
        return self._oracle.outputs(request.prompt, request.params)

    def _check_prefix(self, request: Request, history: History, expected: list[Expected]) -> None:
        """Whatever was delivered is the beginning of the right answer."""
        if request.params.ranked:
            return
        for branch, tokens in history.tokens.items():
            if tuple(tokens) != expected[branch].token_ids[: len(tokens)]:
                raise Violation(f"{request.name}: branch {branch} is {tokens} and not {expected[branch].token_ids}")

    def _judge_error(self, request: Request, history: History, error: ServingError) -> None:
        self._check_prefix(request, history, self._expected(request))
        if request.prompt[-1] == POISON and isinstance(error, PoisonSuspected):
            return
        raise Violation(f"{request.name}: {type(error).__name__}: {error} after {history.tokens}")
