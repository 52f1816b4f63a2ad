"""Clients with the real SDK, each with one stream after the other, and what each stream must have brought."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from constraints import JSON_FORMS, any_constraint, check_json
from live.history import History
from live.oracle import Expected, Oracle

from octavo.client import AsyncClient, Event, FinishReason, RetryPolicy, SamplingParams
from octavo.request.errors import DeadlineExceeded, HistoryLost, NotFound, PoisonSuspected, ServingError
from octavo.request.ids import RequestId, sequence_id
from octavo.request.record import Record, SequenceState
from router.streaming.request_preparer import TENANT
from simulation.cluster import GRACE_MS, Cluster
from simulation.engine import ABANDONED_TOKENS, FREE, MAX_TOKEN, POISON
from simulation.loop import Host
from simulation.pictures import SHARE, PictureChat

LEAVING = ("leave", "give up")
LONG = dict.fromkeys(LEAVING, ABANDONED_TOKENS) | {"share": 320}  # tokens: these take longer than the grace time
# Faults after which a client may wait for longer than the grace time before its keepalive tells it.
SILENT = {"router paused", "partition one way", "partition both ways"}
# Faults by which a sequence loses an owner.
LOSSES = {"worker killed", "machine vanished", "killed in a call", "step hung", "worker paused", "store paused"}
# Faults by which a worker that lives may seem dead.
SEEMING_LOSSES = {"lost request", "late request", "slow link", "partition one way", "partition both ways"}
MAX_LOSSES = 3  # owners in a row, after which a request may fail
BEHAVIOURS = ("read", "cancel", "leave", "give up", "move", "share")


class Violation(Exception):
    """What must never happen has happened."""


@dataclass
class Request:
    """One stream: what is asked for, and what the client does meanwhile."""

    name: str
    prompt: list[int]
    params: SamplingParams
    behaviour: str  # "read"; "cancel"; "leave"; "give up" before any event; "move": another client goes on; "share" it
    after: int  # tokens after which the client does that
    deadline_s: float | None = None
    longest_gap_s: float = 0.0  # between two events
    expected: list[Expected] | None = None  # of an undisturbed run, once it was computed
    chat: PictureChat | None = None  # that the prompt is made of

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
        self.pictures_rng: random.Random = cluster.network.rng(f"pictures {name}")
        self.abandoned: list[str] = []  # requests that this client has left
        self.task: asyncio.Task[None] | None = None
        self.ended = 0

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
        greedy, drawn = {"temperature": 0.0, "max_tokens": length}, {"seed": seed, "max_tokens": length}
        choices = [
            *(SamplingParams(**greedy), SamplingParams(**greedy)),
            SamplingParams(temperature=1.0, **drawn),
            SamplingParams(temperature=0.8, n=2, **drawn),
            SamplingParams(temperature=1.0, n=1, best_of=2, **drawn),
            SamplingParams(temperature=1.0, n=2, constraint=any_constraint(rng), **drawn),
        ]
        params = rng.choice(choices)
        behaviour = rng.choices(BEHAVIOURS, [10, 1, 1, 2, 1, 2])[0]
        deadline_s = rng.uniform(0.05, 0.8) if behaviour == "read" and rng.random() < 0.08 else None
        if rng.random() < 0.25:
            prompt[0], behaviour, deadline_s = FREE, "read", None
        elif rng.random() < self._cluster.poison_share and self._cluster.poisons_left:
            self._cluster.poisons_left -= 1
            prompt[-1], behaviour, deadline_s = POISON, "read", None
        if num_tokens := LONG.get(behaviour):
            params, deadline_s = SamplingParams(temperature=0.0, max_tokens=num_tokens), None
        if self._cluster.json_share and rng.random() < self._cluster.json_share:
            prompt = [1 + token % (MAX_TOKEN - 1) for token in prompt]
            form = rng.choice(JSON_FORMS)
            params = SamplingParams(temperature=1.0, seed=seed, n=2, constraint=form, max_tokens=4 * length)
            behaviour, deadline_s = "read", None
        chat = self._new_chat(prompt)
        request = Request(f"{self.name}-{number}", prompt, params, behaviour, rng.randrange(0, length), deadline_s)
        if chat is not None:
            request.prompt, request.chat = chat.prompt, chat
        return request

    def _new_chat(self, prompt: list[int]) -> PictureChat | None:
        """A chat with pictures, in the place of some prompts."""
        drawn = self.pictures_rng.random()
        if drawn > SHARE or self._cluster.json_share or prompt[0] == FREE or prompt[-1] == POISON:
            return None
        self._log.faults["chat with pictures"] += 1
        return PictureChat.drawn(self.pictures_rng)

    async def _stream(self, client: AsyncClient, request: Request) -> None:
        history = History()
        size = f"{len(request.prompt)} + {request.params.max_tokens}"
        self._log.add(self.name, f"{request.name}: {request.behaviour}, {size}")
        try:
            if request.behaviour == "share":
                complete, _ = await asyncio.gather(self._read(client, request, history), self._look_on(request))
            elif request.behaviour == "give up":
                await self._give_up(client, request, history)
                complete = False
            else:
                complete = await self._read(client, request, history)
            if request.behaviour in LEAVING and not complete:
                self.abandoned.append(request.name)
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
        prompt = request.chat.messages if request.chat is not None else request.prompt
        stream = client.generate(prompt, request.params, request_id=request.name, deadline_s=request.deadline_s)
        num_tokens, last = 0, loop.time()
        async with stream:
            async for event in stream:
                history.add(event)
                num_tokens += len(event.token_ids)
                request.longest_gap_s = max(request.longest_gap_s, loop.time() - last)
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

    async def _give_up(self, client: AsyncClient, request: Request, history: History) -> None:
        """Leaves at any moment of the opening, as a client that is cancelled does."""
        try:
            async with asyncio.timeout(self.rng.uniform(0.0, 0.015)):
                await self._read(client, request, history)
        except TimeoutError:
            pass

    async def _look_on(self, request: Request) -> None:
        """A second client reads the same stream from another router for a while, and leaves."""
        await asyncio.sleep(self.rng.uniform(0.0, 0.3))
        history = History()
        endpoint = self.rng.choice(self._cluster.endpoints)
        try:
            async with asyncio.timeout(self.rng.uniform(0.05, 2.0)):
                async with AsyncClient([endpoint]) as other, other.attach(request.name) as stream:
                    async for event in stream:
                        history.add(event)
        except (TimeoutError, ServingError):
            pass
        self._check_prefix(request, history)

    async def _move(self, request: Request, history: History, resume_token: bytes) -> bool:
        """Goes on with another client, from the resume token."""
        async with AsyncClient(self._cluster.endpoints, policy=RetryPolicy(min_retries=10**6)) as other:
            async with other.attach(resume_token=resume_token) as stream:
                async for event in stream:
                    if event.branch in history.finishes and not event.token_ids:
                        history.ended |= event.finished is not None  # a new client is told of the end again
                        continue
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
        if request.longest_gap_s > GRACE_MS / 1000 and SILENT & set(self._log.faults):
            allowed.add(FinishReason.CANCELLED)  # the client had no router for the grace time, and could not know it
        if request.deadline_s is not None:
            allowed.add(FinishReason.DEADLINE)
        if not early <= allowed:
            raise Violation(f"{request.name}: ended early, and nobody asked for it: {history}")
        if request.is_free:
            self._compare_journals(request, history)
        elif complete and not early:
            history.check(self._expected(request))
            for branch, finish in history.finishes.items():
                if finish is FinishReason.STOP and not request.params.stop:
                    check_json(request.params.constraint, history.texts[branch])
        self._check_prefix(request, history)

    def _judge_error(self, request: Request, history: History, error: ServingError) -> None:
        self._check_prefix(request, history)
        if isinstance(error, PoisonSuspected) and request.prompt[-1] == POISON:
            return
        if (
            isinstance(error, PoisonSuspected)
            and sum(self._log.faults[kind] for kind in LOSSES | {"poison"}) >= MAX_LOSSES
            and set(self._log.faults) & (LOSSES | SEEMING_LOSSES)
        ):
            self._log.faults["innocent, and suspected"] += 1  # its owners have died in a row: it may fail
            return
        if request.deadline_s is not None and (isinstance(error, DeadlineExceeded) or error.retryable):
            return  # a retry would have come too late
        if self._is_lossy() and isinstance(error, HistoryLost | NotFound):
            return
        raise Violation(f"{request.name}: {type(error).__name__}: {error} after {history.tokens}")

    def outlived(self) -> list[str]:
        """The requests that this client has left, and that ran to their end all the same."""
        records = [(name, self._record(name)) for name in self.abandoned]
        return [name for name, record in records if record is not None and record.state is SequenceState.DONE]

    def _record(self, name: str) -> Record | None:
        stored = self._cluster.store.state.get(sequence_id(TENANT, RequestId(name)))
        return stored.record if stored is not None else None

    def _expected(self, request: Request) -> list[Expected]:
        if request.expected is None:
            words = request.chat.words if request.chat is not None else {}
            request.expected = self._oracle.showing(words).outputs(request.prompt, request.params)
        return request.expected

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
