"""Who calls the store, and what they may call: two workers, two routers and a client, none of whom keeps any order.

A caller knows every epoch and every migration that there has been, and may make any of its calls at any time. So a call
that is late, repeated, or whose reply was lost is a call like any other. Only the client is in earnest: a router that
attaches has a client until it detaches. Time passes in halves of a lease, which all members renew that are not silent.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from modelcheck import rules
from modelcheck.explorer import Step
from modelcheck.stored import StoreModel

from octavo.request.hashing import prompt_chain
from octavo.request.ids import Incarnation, RequestId, sequence_id
from octavo.request.record import NewSequence, Record
from octavo.request.sampling import FinishReason
from octavo.store.calls import AppendItem, Finish, Member, MigrateStatus, QueueLimits, TakeReason, TakeRequest

SEQ = sequence_id("tenant", RequestId("a"))
PROMPT = (1, 2, 3)
LEASE_MS, TICK_MS, CLAIM_MS, GRACE_MS, OUTAGE_MS = 3000, 1500, 1500, 3000, 3500
WORKERS = (Incarnation("A"), Incarnation("B"))
ROUTERS = (Incarnation("R"), Incarnation("S"))
FAULTS = (
    "silent",  # a member crashes or stands still: it renews no lease any more
    "leave",  # a worker is told to stop
    "restart",  # the store is away for longer than any lease; nothing is lost
    "failover",  # a replica takes over, with the state of some earlier moment
)
Call = tuple[Any, ...]
ALL = frozenset({"take", "requeue", "append", "finish", "sweep", "pop"})
MIGRATIONS = frozenset({"begin", "commit", "abort"})
ATTACHMENTS = frozenset({"attach", "detach", "cancel", "sweep"})


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What may be called, and what may happen, in one exploration."""

    calls: frozenset[str] = ALL
    max_epoch: int = 3  # nothing raises the epoch further
    num_tokens: int = 2  # of a branch
    num_branches: int = 1
    max_migration: int = 2
    faults: dict[str, int] = field(default_factory=dict)
    deadline_ms: int = 0
    keep: bool = True  # on_disconnect
    reasons: tuple[TakeReason, ...] = tuple(TakeReason)
    standby: bool = False  # workers are buddies: they have what the other one has computed, journalled or not
    reads_journal: bool = True  # as whoever follows an owner does; else it goes on from what it has


class World(NamedTuple):
    """The store, and what no process knows: the facts by which rules are judged."""

    store: int
    budget: tuple[int, ...]  # faults that may still happen, in the order of FAULTS
    backup: int = -1  # the replica's state; -1: as the primary
    silent: frozenset[Incarnation] = frozenset()
    left: frozenset[Incarnation] = frozenset()
    clients: frozenset[Incarnation] = frozenset()  # routers with a client
    cancelled: bool = False
    lost: tuple[int, ...] = ()  # the journal before the failover
    life: int = 0  # failovers
    begun: frozenset[tuple[int, int, str]] = frozenset()  # migrations (epoch, number, target)
    verdicts: frozenset[tuple[int, int, str]] = frozenset()  # how they ended, as callers were told

    def has(self, fault: str) -> bool:
        return self.budget[FAULTS.index(fault)] > 0

    def spend(self, fault: str) -> "World":
        at = FAULTS.index(fault)
        return self._replace(budget=(*self.budget[:at], self.budget[at] - 1, *self.budget[at + 1 :]))


class Callers:
    """A modelcheck.explorer.Model of a configuration."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.stores = StoreModel()
        self.contexts: list[tuple[int, ...]] = []  # of each token: those before it
        self._tokens: dict[Any, int] = {}

    def initial(self) -> World:
        number = 0
        for member in (*WORKERS, *ROUTERS):
            number, _ = self.stores.call(number, "heartbeat", _member(member), LEASE_MS)
        number, _ = self.stores.call(number, "accept", _new_sequence(self.configuration), QueueLimits())
        budget = tuple(self.configuration.faults.get(fault, 0) for fault in FAULTS)
        return World(number, budget, clients=frozenset(ROUTERS[:1]))

    def record(self, number: int) -> Record | None:
        stored = self.stores.view(number).get(SEQ)
        return None if stored is None else stored.record

    def journals(self, number: int) -> tuple[tuple[int, ...], ...]:
        stored = self.stores.view(number).get(SEQ)
        return () if stored is None else tuple(tuple(each) for each in stored.journals)

    def steps(self, world: Any) -> Iterator[Step]:
        record = self.record(world.store)
        if record is not None and not (record.state.ended and record.epoch == 0):
            for call in self._calls(world, record):
                yield self._made(world, call)
        yield from self._happenings(world)
        yield Step("time passes", self._later(world, TICK_MS))

    # What is called

    def _calls(self, world: World, record: Record) -> Iterator[Call]:
        c = self.configuration
        rising = [epoch for epoch in range(record.epoch + 1) if epoch < c.max_epoch]
        owning = range(1, record.epoch + 1)
        for call in ("sweep",), ("cancel",):
            if call[0] in c.calls:
                yield call
        if "pop" in c.calls:
            yield ("pop",)
        if "take" in c.calls:
            for epoch in rising:
                for worker in WORKERS:
                    for reason in c.reasons:
                        yield ("take", epoch, worker, reason)
        if "requeue" in c.calls:
            yield from (("requeue", epoch) for epoch in rising if epoch)
        if "finish" in c.calls:
            yield from (("finish", epoch) for epoch in owning)
        if "append" in c.calls:
            for epoch in owning:
                for worker in WORKERS:
                    yield from self._appends(world, worker, epoch)
        if "begin" in c.calls:
            for epoch in [epoch for epoch in owning if epoch < c.max_epoch]:
                for number in range(1, c.max_migration + 1):
                    yield from self._migrations(world, epoch, number)
        if "attach" in c.calls:
            for router in ROUTERS:
                yield ("detach" if router in world.clients else "attach", router)

    def _appends(self, world: World, worker: Incarnation, epoch: int) -> Iterator[Call]:
        """What this worker has computed at this epoch: after what it has got, its next tokens, in pieces of any size.

        The owner has got the journal, or what a failover has cut off from it. Another worker has any part of these; as
        a buddy perhaps with a token more, which the other one has computed and not journalled.
        """
        c, record = self.configuration, self.record(world.store)
        is_owner = record is not None and (worker, epoch) == (record.owner, record.epoch)
        for branch, journal in enumerate(self.journals(world.store)):
            whole = {journal, world.lost} if branch == 0 and world.lost[: len(journal)] == journal else {journal}
            parts = {each[:end] for each in whole for end in range(len(each) + 1)}
            if c.standby:
                owners = [(other, of) for other in WORKERS if other != worker for of in range(1, epoch + 1)]
                behind = [each for each in parts if len(each) < c.num_tokens]
                parts |= {(*each, self._token(each, *who, world.life, branch)) for each in behind for who in owners}
            for history in whole if is_owner and (c.reads_journal or epoch == 1) else parts:
                log = history
                while len(log) < c.num_tokens:
                    log += (self._token(log, worker, epoch, world.life, branch),)
                for first in range(c.num_tokens):
                    for end in range(first + 1, c.num_tokens + 1):
                        yield ("append", worker, epoch, branch, first, log[first:end])

    def _migrations(self, world: World, epoch: int, number: int) -> Iterator[Call]:
        lengths = {tuple(map(len, self.journals(world.store))), (0,) * self.configuration.num_branches}
        lengths.add((max(map(len, self.journals(world.store))),) * self.configuration.num_branches)
        for target in WORKERS:
            yield ("begin", epoch, number, target)
            for each in sorted(lengths):
                yield ("commit", epoch, number, target, each)
        yield ("abort", epoch, number)

    def _token(self, context: tuple[int, ...], *who: Any) -> int:
        """The token that somebody computes after a context. No two computations give the same one."""
        token = self._tokens.setdefault((context, who), len(self.contexts))
        if token == len(self.contexts):
            self.contexts.append(context)
        return token

    def _made(self, world: World, call: Call) -> Step:
        number, reply = self._perform(world.store, *call)
        status = getattr(reply, "status", None)
        what = f"{call[0]}({', '.join(map(str, call[1:]))})" + (f" → {status}" if status else "")
        after = self._noted(world._replace(store=number), call, reply)
        return Step(what, after, rules.wrong_step(self, world, after, call))

    def _perform(self, number: int, kind: str, *args: Any) -> tuple[int, Any]:
        call = self.stores.call
        match kind:
            case "pop":
                return call(number, "pop", "model", 1, CLAIM_MS)
            case "sweep":
                return call(number, "sweep", 8, GRACE_MS)
            case "take":
                epoch, worker, reason = args
                return call(number, "take_ownership", TakeRequest(SEQ, epoch, worker, f"{epoch}{worker}", reason))
            case "append":
                worker, epoch, branch, first, tokens = args
                ends = first + len(tokens) == self.configuration.num_tokens
                finish = FinishReason.LENGTH if ends else FinishReason.NONE
                number, replies = call(
                    number, "append_batch", worker, (AppendItem(SEQ, epoch, branch, first, tokens, finish),)
                )
                return number, replies[0]
            case "finish":
                return call(number, "finish", Finish(SEQ, FinishReason.ERROR, failure="broken", epoch=args[0]))
            case "begin" | "commit" | "abort":
                return call(number, f"mig_{kind}", SEQ, *args)
            case _:  # requeue, cancel, attach, detach
                return call(number, kind, SEQ, *args)

    def _noted(self, after: World, call: Call, reply: Any) -> World:
        """What the call and its reply mean, beside the store's new state."""
        kind, *args = call
        match kind:
            case "attach":
                return after._replace(clients=after.clients | {args[0]})
            case "detach":
                return after._replace(clients=after.clients - {args[0]})
            case "cancel":
                return after._replace(cancelled=True)
            case "begin" if reply.status in (MigrateStatus.OK, MigrateStatus.SAME):
                return after._replace(begun=after.begun | {tuple(args)})
            case "commit" | "abort":
                done = reply.status in (MigrateStatus.OK, MigrateStatus.SAME, MigrateStatus.COMMITTED)
                verdict = "committed" if done else "aborted" if reply.status is MigrateStatus.ABORTED else ""
                told = {(args[0], args[1], verdict)} if verdict else set()
                return after._replace(verdicts=after.verdicts | told)
        return after

    # What happens

    def _happenings(self, world: World) -> Iterator[Step]:
        if world.has("silent"):
            for member in (*WORKERS, *ROUTERS):
                if member not in world.silent | world.left:
                    yield Step(f"{member} is silent", world.spend("silent")._replace(silent=world.silent | {member}))
        if world.has("leave"):
            for worker in WORKERS:
                if worker not in world.silent | world.left:
                    number, _ = self.stores.call(world.store, "leave", _member(worker))
                    after = world.spend("leave")._replace(store=number, left=world.left | {worker})
                    yield Step(f"{worker} leaves", after)
        if world.has("restart"):
            yield Step("the store restarts", self._restarted(world.spend("restart")))
        if world.has("failover"):
            yield self._failover(world)

    def _failover(self, world: World) -> Step:
        """The replica has got everything up to some moment and nothing after it. Then it takes over."""
        if world.backup < 0:
            return Step("the replica gets no more", world._replace(backup=world.store))
        lost = max(self.journals(world.store), key=len, default=())
        after = self._restarted(world.spend("failover")._replace(store=world.backup, backup=-1, life=world.life + 1))
        return Step("the replica takes over", after._replace(lost=lost, begun=frozenset(), verdicts=frozenset()))

    def _restarted(self, world: World) -> World:
        number = self.stores.advance(world.store, OUTAGE_MS)  # nobody could renew a lease
        return world._replace(store=self.stores.apply(number, "restart", lambda state: state.restart()))

    def _later(self, world: World, ms: int) -> World:
        number = self.stores.advance(world.store, ms)
        for member in (*WORKERS, *ROUTERS):
            if member not in world.silent | world.left:
                number, renewal = self.stores.call(number, "heartbeat", _member(member), LEASE_MS)
                if renewal.lapsed and member in world.clients:  # a router attaches its clients again
                    number, _ = self.stores.call(number, "attach", SEQ, member)
        return world._replace(store=number)


def _member(name: Incarnation) -> Member:
    return Member("worker" if name in WORKERS else "router", name, b"")


def _new_sequence(c: Configuration) -> NewSequence:
    return NewSequence(
        seq_id=SEQ,
        request_id=RequestId("a"),
        body_hash=b"body",
        tenant="tenant",
        salt="",
        model="model",
        layout="layout",
        sampling=b"",
        prompt=PROMPT,
        prompt_chain=prompt_chain(PROMPT),
        num_branches=c.num_branches,
        max_tokens=c.num_tokens,
        priority=3,
        deadline_in_ms=c.deadline_ms,
        keep_on_disconnect=c.keep,
        router=ROUTERS[0],
    )
