"""Clients with the real SDK, each with one stream after the other, and what each stream must have brought."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from live.history import History
from live.oracle import Expected, Oracle

from octavo.client import AsyncClient, Event, FinishReason, RetryPolicy, SamplingParams
from octavo.errors import DeadlineExceeded, HistoryLost, NotFound, PoisonSuspected, ServingError
from octavo.ids import RequestId, sequence_id
from router.streaming.request_preparer import TENANT
from simulation.cluster import Cluster
from simulation.engine import FREE, MAX_TOKEN, POISON
from simulation.loop import Host


class Violation(Exception):
    """What must never happen has happened."""


@dataclass
class Request:
    """One stream: what is asked for, and what the client does meanwhile."""

    name: str
    prompt: list[int]
    params: SamplingParams
    behaviour: str  # "read", "cancel", "leave", or "move": another client attaches
    after: int  # tokens after which the client does that
    deadline_s: float | None = None

    @property
    def is_free(self) -> bool:
        """Whether each worker computes other tokens, so that only the journal knows which are right."""
        return self.prompt[0] == FREE


class Client:
    """One client on a machine of its own."""

    def __init__(
        self, cluster: Cluster, name: str, oracle: Oracle, num_streams: int, is_lossy: Callable[[], bool]
    ) -> None:
        """`is_lossy` says whether the store may have lost what it had acknowledged."""
        self._cluster = cluster
        self._is_lossy = is_lossy
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
        deadline_s = rng.uniform(0.05, 0.8) if behaviour == "read" and rng.random() < 0.08 else None
        if rng.random() < 0.25:
            prompt[0], behaviour, deadline_s = FREE, "read", None
        elif rng.random() < 0.02:
            prompt[-1], behaviour, deadline_s = POISON, "read", None
        return Request(f"{self.name}-{number}", prompt, params, behaviour, rng.randrange(0, length), deadline_s)

    async def _stream(self, client: AsyncClient, request: Request) -> None:
        history = History()
        size = f"{len(request.prompt)} + {request.params.max_tokens}"
        self._log.add(self.name, f"{request.name}: {request.behaviour}, {size}")
        try:
            complete = await self._read(client, request, history)
            self._judge(request, history, complete=complete)
        except ServingError as error:
            self._log.add(self.name, f"{request.name}: {type(error).__name__}")
            self._judge_error(request, history, error)
        except AssertionError as error:
            raise Violation(f"{request.name}: {error}: {history}") from error
        self._log.add(self.name, f"{request.name}: over")

    async def _read(self, client: AsyncClient, request: Request, history: History) -> bool:
        """Reads the stream, and does what the request says. Returns whether the stream came to its end."""
        loop = asyncio.get_running_loop()
        stream = client.generate(
            request.prompt, request.params, request_id=request.name, deadline_s=request.deadline_s
        )
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

    def _judge(self, request: Request, history: History, *, complete: bool) -> None:
        """The stream has come to its end, or was left: it says what it must say."""
        ends = set(history.finishes.values())
        early = ends & {FinishReason.CANCELLED, FinishReason.DEADLINE}
        allowed = {FinishReason.CANCELLED} if request.behaviour == "cancel" else set()
        if request.deadline_s is not None:
            allowed.add(FinishReason.DEADLINE)
        if not early <= allowed:
            raise Violation(f"{request.name}: ended early, and nobody asked for it: {history}")
        if request.is_free:
            self._compare_journals(request, history)
        elif complete and not early:
            history.check(self._expected(request))
        self._check_prefix(request, history)

    def _judge_error(self, request: Request, history: History, error: ServingError) -> None:
        self._check_prefix(request, history)
        if request.prompt[-1] == POISON and isinstance(error, PoisonSuspected):
            return
        if request.deadline_s is not None and isinstance(error, DeadlineExceeded):
            return
        if self._is_lossy() and isinstance(error, HistoryLost | NotFound):
            return
        raise Violation(f"{request.name}: {type(error).__name__}: {error} after {history.tokens}")

    def _expected(self, request: Request) -> list[Expected]:
        return self._oracle.outputs(request.prompt, request.params)

    def _check_prefix(self, request: Request, history: History) -> None:
        """Whatever was delivered is the beginning of the right answer."""
        if request.params.ranked or request.is_free:
            return
        for branch, expected in enumerate(self._expected(request)):
            tokens = tuple(history.tokens.get(branch, ()))
            if tokens != expected.token_ids[: len(tokens)]:
                raise Violation(f"{request.name}: branch {branch} is {tokens} and not {expected.token_ids}")

    def _compare_journals(self, request: Request, history: History) -> None:
        """The client has what the journals say, whoever computed it."""
        stored = self._cluster.store.state.get(sequence_id(TENANT, RequestId(request.name)))
        if stored is None or request.params.ranked:
            return
        for branch, journal in enumerate(stored.journals):
            if history.tokens.get(branch, []) != journal:
                raise Violation(f"{request.name}: branch {branch} is {history.tokens[branch]}; journal: {journal}")
