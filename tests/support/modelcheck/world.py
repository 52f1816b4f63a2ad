"""The state of the whole service in the model: the store, two workers, two routers, a client, and calls under way.

One sequence, of one branch or of a few: then its tokens are dealt to the branches in turn. A call and its reply are one
step. What is late, repeated or lost is a copy of a call in `late`: from then on it may be done at any time, any number
of times, and nobody hears the reply. So a call whose reply is lost is a late call that is done, and then the same call
again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from octavo.request.hashing import extend_chain, prompt_chain
from octavo.request.ids import Incarnation, RequestId, sequence_id

SEQ = sequence_id("tenant", RequestId("a"))
PROMPT = (1, 2, 3)
PROMPT_CHAIN = prompt_chain(PROMPT)
LEASE_MS, TICK_MS, CLAIM_MS, GRACE_MS = 3000, 1500, 1500, 3000


class Run(NamedTuple):
    """The sequence on one worker."""

    epoch: int
    life: int  # how often the store had failed over when it was admitted
    log: tuple[int, ...]  # tokens that the journal has accepted, as far as the worker knows
    mode: str = "runs"  # "moves": stopped for a migration; "cancels", "breaks": the worker is about to end it
    moves: int = 0  # migrations begun at this epoch


class Worker(NamedTuple):
    number: int = 0  # of its process: a new one after each restart
    state: str = "up"  # "stalled", "leaving", "down"
    run: Run | None = None
    known: int = 0  # the newest epoch of a run that has ended here
    offer: tuple[int, int, tuple[int, ...]] | None = None  # epoch, migration and tokens that were copied here
    returns: int = 0  # the epoch of what has moved here, cannot run here, and is to be given back


class Task(NamedTuple):
    """A sequence on its way to a worker."""

    stage: str  # "take", "schedule", "requeue", "fail"
    epoch: int
    reason: str
    worker: int = -1
    number: int = 0
    journal: tuple[int, ...] | None = None  # as read before the take


class Router(NamedTuple):
    number: int = 0
    state: str = "up"  # "stalled", "down"
    task: Task | None = None
    telling: bool = False  # it has yet to tell the store whether it is attached
    guest: bool = False  # another client of the request is here


class Client(NamedTuple):
    router: int = 0  # -1: none
    tokens: tuple[int, ...] = ()
    confirmed: int = 0  # how many of the tokens a reading of the journal has found there
    generation: int = 0  # of the store at the last reading; -1: the next reading begins at index 0
    end: str = ""  # the terminal event, or the status that ended the stream for good
    gone: bool = False


class Truth(NamedTuple):
    """What no process knows: the facts by which rules are judged."""

    faulty: frozenset[str] = frozenset()  # processes that have crashed or stood still
    life: int = 0  # failovers
    lost: bool = False  # whether a failover has lost tokens
    cancelled: bool = False  # whether the client has asked for it
    admitted: int = 0  # the newest epoch of which a router was told that a worker runs it
    verdicts: frozenset[tuple[int, int, str]] = (
        frozenset()
    )  # how migrations (epoch, number) ended, as callers were told


class World(NamedTuple):
    store: int
    workers: tuple[Worker, Worker]
    routers: tuple[Router, Router]
    client: Client
    late: frozenset[tuple[Any, ...]]
    backup: int  # the replica's state; -1: as the primary
    budget: tuple[int, ...]  # faults that may still happen, in the order of FAULTS
    truth: Truth

    def with_worker(self, index: int, **changes: Any) -> "World":
        workers = list(self.workers)
        workers[index] = workers[index]._replace(**changes)
        return self._replace(workers=tuple(workers))

    def with_router(self, index: int, **changes: Any) -> "World":
        routers = list(self.routers)
        routers[index] = routers[index]._replace(**changes)
        return self._replace(routers=tuple(routers))

    def with_client(self, **changes: Any) -> "World":
        return self._replace(client=self.client._replace(**changes))

    def with_truth(self, **changes: Any) -> "World":
        return self._replace(truth=self.truth._replace(**changes))

    def is_attached(self, router: int) -> bool:
        """Whether a router has a client of the request."""
        return self.client.router == router or self.routers[router].guest

    def has(self, fault: str) -> bool:
        return self.budget[FAULTS.index(fault)] > 0

    def spend(self, fault: str) -> "World":
        at = FAULTS.index(fault)
        return self._replace(budget=(*self.budget[:at], self.budget[at] - 1, *self.budget[at + 1 :]))


FAULTS = (
    "late",  # a call that is done at any later time, any number of times, beside the call itself
    "item",  # an item of a worker's stream that arrives at any later time, any number of times
    "crash",  # a worker ends without a word
    "stall",  # a worker stands still, beyond its lease if it pleases, and may go on
    "leave",  # a worker is told to stop (SIGTERM)
    "bad link",  # a router loses its connection to a worker that lives
    "refuse",  # a worker does not admit a sequence now
    "reject",  # a worker says that it can never hold the sequence
    "router crash",
    "router stall",  # a router's heartbeats are missing for as long as it pleases
    "guest",  # another client attaches to the same request, on the other router
    "reconnect",  # the client's stream breaks
    "walk away",  # the client leaves for good
    "cancel",  # the client asks for the end
    "migrate",
    "restart",  # the store is away for longer than any lease; nothing is lost
    "failover",  # a replica takes over, with the state of some earlier moment
)


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What may happen in one exploration."""

    num_tokens: int = 3  # of all branches
    num_branches: int = 1
    most_at_once: int = 1  # tokens in one append
    faults: dict[str, int] = field(default_factory=dict)
    late: frozenset[str] = frozenset()  # the kinds of calls that may be late
    num_routers: int = 2  # that look for work; the client may use both
    begins: str = "running"  # "queued"; "new": the client has yet to call
    client: bool = True  # False: there is none from the start, and the request is kept
    keep: bool = False  # on_disconnect
    deadline_ms: int = 0
    endless: bool = False  # no worker finds an end, so somebody has to end the sequence
    without: frozenset[str] = frozenset()  # rules of processes that are left out

    @property
    def budget(self) -> tuple[int, ...]:
        unknown = set(self.faults) - set(FAULTS)
        if unknown:
            raise ValueError(f"no such faults: {unknown}")
        return tuple(self.faults.get(fault, 0) for fault in FAULTS)


def worker_name(index: int, number: int) -> Incarnation:
    return Incarnation(f"{'AB'[index]}{number}")


def router_name(index: int, number: int) -> Incarnation:
    return Incarnation(f"R{index}.{number}")


class Tokens:
    """Tokens that tell by whom and after what they were computed: no two computations give the same one."""

    def __init__(self) -> None:
        self._ids: dict[tuple[Any, ...], int] = {}
        self.contexts: list[tuple[int, ...]] = []

    def next(self, context: tuple[int, ...], *who: Any) -> int:
        token = self._ids.setdefault((context, who), len(self.contexts))
        if token == len(self.contexts):
            self.contexts.append(context)
        return token

    def misplaced(self, tokens: tuple[int, ...]) -> bool:
        """Whether one of them was computed after other tokens than those before it."""
        return any(self.contexts[token] != tokens[:i] for i, token in enumerate(tokens))


def dealt(position: int, num_branches: int) -> tuple[int, ...]:
    """The lengths of the branches of a sequence that has so many tokens."""
    return tuple((position - branch + num_branches - 1) // num_branches for branch in range(num_branches))


def gathered(journals: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The tokens that were dealt to these branches, up to the first one that is missing."""
    found: list[int] = []
    while len(found) // len(journals) < len(journals[len(found) % len(journals)]):
        found.append(journals[len(found) % len(journals)][len(found) // len(journals)])
    return tuple(found)


_chains: dict[tuple[int, ...], int] = {(): PROMPT_CHAIN}


def chain_of(tokens: tuple[int, ...]) -> int:
    if tokens not in _chains:
        _chains[tokens] = extend_chain(chain_of(tokens[:-1]), tokens[-1:])
    return _chains[tokens]
