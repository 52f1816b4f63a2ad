"""The protocol with one rule left out at a time. The model checker must see each.

A rule of the store is left out by a weaker function in the place of one in octavo.store.memory, which calls the real
one with what it would have refused made right. A rule of a process is left out by its name.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from modelcheck.configurations import ATTACHMENTS, CALLS, CONFIGURATIONS, MIGRATIONS, alone
from modelcheck.world import Configuration

from octavo.request.ids import Incarnation
from octavo.store.calls import AppendStatus, MigrateStatus, TakeReason
from octavo.store.memory import MemoryState, MemoryStore, journal, migration, ownership, store
from octavo.store.memory.ownership import protected_ms

Patches = list[tuple[Any, str, Any]]


@dataclass(frozen=True, kw_only=True)
class Weakening:
    """A protocol without one rule, and a configuration in which that shows."""

    configuration: Configuration
    patches: Callable[[], Patches] = list

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The store of this process is the weaker one meanwhile."""
        patches = [patch.object(where, name, weaker) for where, name, weaker in self.patches()]
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()


def without(rule: str, configuration: Configuration) -> Weakening:
    """A process does not keep this rule."""
    return Weakening(configuration=replace(configuration, without=configuration.without | {rule}))


# ---- weaker functions of the store ---------------------------------------------------------------------------------


def record_of(state: MemoryState, seq_id: Any) -> Any:
    stored = state.get(seq_id)
    return None if stored is None else stored.record


def append_any_epoch() -> Patches:
    def weaker(state: Any, owner: Any, item: Any) -> Any:
        record = record_of(state, item.seq_id)
        return journal.append(state, owner, replace(item, epoch=record.epoch) if record else item)

    return [(store, "append", weaker)]


def append_any_owner() -> Patches:
    def weaker(state: Any, owner: Any, item: Any) -> Any:
        record = record_of(state, item.seq_id)
        return journal.append(state, record.owner if record else owner, item)

    return [(store, "append", weaker)]


def append_of_anybody() -> Patches:
    def weaker(state: Any, owner: Any, item: Any) -> Any:
        record = record_of(state, item.seq_id)
        return journal.append(state, record.owner, replace(item, epoch=record.epoch)) if record else None

    return [(store, "append", weaker)]


def append_anywhere() -> Patches:
    def weaker(state: Any, owner: Any, item: Any) -> Any:
        stored = state.get(item.seq_id)
        at_end = replace(item, first_index=len(stored.journals[0])) if stored else item
        return journal.append(state, owner, at_end)

    return [(store, "append", weaker)]


def append_after_the_end() -> Patches:
    def weaker(state: Any, owner: Any, item: Any) -> Any:
        reply = journal.append(state, owner, item)
        stored = state.get(item.seq_id)
        if reply.status is AppendStatus.GAP and stored is not None:  # the tokens between count as received
            stored.journals[0].extend(item.token_ids)
            return replace(reply, status=AppendStatus.OK)
        return reply

    return [(store, "append", weaker)]


def take_any_epoch() -> Patches:
    real = ownership.take_ownership

    def weaker(state: Any, request: Any) -> Any:
        record = record_of(state, request.seq_id)
        return real(state, replace(request, expected_epoch=record.epoch) if record else request)

    return [(ownership, "take_ownership", weaker)]


def take_past_the_deadline() -> Patches:
    real = ownership.take_ownership

    def weaker(state: Any, request: Any) -> Any:
        with patch.object(MemoryState, "past_deadline", lambda self, record: False):
            return real(state, request)

    return [(ownership, "take_ownership", weaker)]


def take_without_evidence() -> Patches:
    real = protected_ms

    def weaker(state: Any, owner: Any, reason: Any) -> int:
        return 0 if reason is TakeReason.CONNECTION else real(state, owner, reason)

    return [(ownership, "protected_ms", weaker)]


def take_despite_the_lease() -> Patches:
    real = protected_ms

    def weaker(state: Any, owner: Any, reason: Any) -> int:
        return 0 if reason is TakeReason.LEASE else real(state, owner, reason)

    return [(ownership, "protected_ms", weaker)]


def hand_over_at_the_same_epoch() -> Patches:
    real = ownership.hand_over

    def weaker(state: Any, stored: Any, owner: Any, **how: Any) -> None:
        epoch = stored.record.epoch
        real(state, stored, owner, **how)
        stored.record.epoch = max(epoch, 1)

    return [(ownership, "hand_over", weaker)]


def requeue_at_the_same_epoch() -> Patches:
    real = MemoryStore.requeue

    async def weaker(self: Any, seq_id: Any, epoch: int) -> bool:
        record = record_of(self.shared, seq_id)
        before = record.epoch if record else 0
        waits = await real(self, seq_id, epoch)
        if record is not None:
            record.epoch = before
        return waits

    return [(MemoryStore, "requeue", weaker)]


def requeue_any_epoch() -> Patches:
    real = MemoryStore.requeue

    async def weaker(self: Any, seq_id: Any, epoch: int) -> bool:
        record = record_of(self.shared, seq_id)
        return await real(self, seq_id, record.epoch if record else epoch)

    return [(MemoryStore, "requeue", weaker)]


def finish_any_epoch() -> Patches:
    return [(store, "of_this_epoch", lambda stored, finish: True)]


def no_freeze() -> Patches:
    return [(MemoryState, "freeze_ms", lambda self: 0)]


def no_tombstones() -> Patches:
    return [(ownership, "has_left", lambda state, owner: False)]


def one_attachment() -> Patches:
    real = MemoryStore.attach

    async def weaker(self: Any, seq_id: Any, router: Incarnation) -> Any:
        if record := record_of(self.shared, seq_id):
            record.routers = ()
        return await real(self, seq_id, router)

    return [(MemoryStore, "attach", weaker)]


def detach_all() -> Patches:
    real = MemoryState.detach

    def weaker(self: Any, stored: Any, router: Incarnation, *how: Any) -> None:
        for each in stored.record.routers:
            real(self, stored, each, *how)

    return [(MemoryState, "detach", weaker)]


def claims_without_end() -> Patches:
    from octavo.store.memory import sweep

    return [(sweep, "_requeue_claims", lambda state, limit: [])]


def commit_any_migration() -> Patches:
    real = migration.mig_commit

    def weaker(state: Any, seq_id: Any, epoch: int, number: int, target: Any, num_tokens: Any) -> Any:
        if record := record_of(state, seq_id):
            record.mig_number, record.mig_to, epoch = number, target, record.epoch
        return real(state, seq_id, epoch, number, target, num_tokens)

    return [(migration, "mig_commit", weaker)]


def commit_any_length() -> Patches:
    real = migration.mig_commit

    def weaker(state: Any, seq_id: Any, epoch: int, number: int, target: Any, num_tokens: Any) -> Any:
        stored = state.get(seq_id)
        lengths = [len(each) for each in stored.journals] if stored else num_tokens
        return real(state, seq_id, epoch, number, target, lengths)

    return [(migration, "mig_commit", weaker)]


def commit_compares_the_first_branch() -> Patches:
    real = migration.mig_commit

    def weaker(state: Any, seq_id: Any, epoch: int, number: int, target: Any, num_tokens: Any) -> Any:
        stored = state.get(seq_id)
        others = [len(each) for each in stored.journals[1:]] if stored else []
        return real(state, seq_id, epoch, number, target, [*num_tokens[:1], *others])

    return [(migration, "mig_commit", weaker)]


def abort_after_a_commit() -> Patches:
    real = migration.mig_abort

    def weaker(state: Any, seq_id: Any, epoch: int, number: int) -> Any:
        reply = real(state, seq_id, epoch, number)
        return replace(reply, status=MigrateStatus.ABORTED) if reply.status is MigrateStatus.COMMITTED else reply

    return [(migration, "mig_abort", weaker)]


def abort_without_a_number() -> Patches:
    real = migration.mig_abort

    def weaker(state: Any, seq_id: Any, epoch: int, number: int) -> Any:
        record = record_of(state, seq_id)
        before = record.mig_number if record else 0
        reply = real(state, seq_id, epoch, number)
        if record is not None and not record.mig_to and record.mig_number == number:
            record.mig_number = min(before, number - 1)
        return reply

    return [(migration, "mig_abort", weaker)]


def abort_changes_nothing() -> Patches:
    real = migration.mig_abort

    def weaker(state: Any, seq_id: Any, epoch: int, number: int) -> Any:
        record = record_of(state, seq_id)
        before = (record.mig_number, record.mig_to) if record else None
        reply = real(state, seq_id, epoch, number)
        if record is not None and before is not None:
            record.mig_number, record.mig_to = before
        return reply

    return [(migration, "mig_abort", weaker)]


def begin_any_number() -> Patches:
    return [(migration, "outdated", lambda record, number: False)]


# ---- all of them ---------------------------------------------------------------------------------------------------

# One worker owns the sequence twice.
BACK = alone(faults={"stall": 1, "crash": 1, "late": 1}, late=frozenset({"append"}))
LATE = Configuration(faults={"late": 2, "crash": 1}, late=CALLS)
QUEUED = Configuration(begins="queued", faults={"late": 1, "refuse": 1, "stall": 1}, late=CALLS)
MOVES = Configuration(faults={"migrate": 3, "late": 2}, late=MIGRATIONS | {"append"})
FAILOVER = Configuration(faults={"failover": 1, "item": 1, "late": 1}, late=CALLS | {"item"})
FAILOVER_AND_CRASH = CONFIGURATIONS["a failover, a worker crashes"]
STOPS = Configuration(faults={"leave": 2, "late": 1}, late=CALLS | {"leave"})
NEW = Configuration(num_tokens=1, begins="new", endless=True, faults={"walk away": 1, "late": 1}, late=ATTACHMENTS)
GUESTS = CONFIGURATIONS["two clients on two routers"]
STALLED_ROUTER = CONFIGURATIONS["two clients, a router stands still"]
ITEMS = CONFIGURATIONS["an item is late, the client moves"]
MOVE = alone(faults={"migrate": 1})
NOBODY = Configuration(begins="queued", client=False, keep=True, faults={"router crash": 1})
LINKS = Configuration(faults={"bad link": 1})

WEAKENINGS = {
    "append: neither epoch nor owner is compared": Weakening(configuration=LATE, patches=append_of_anybody),
    "append: the epoch is not compared": Weakening(configuration=BACK, patches=append_any_epoch),
    "append: the owner is not compared": Weakening(configuration=FAILOVER_AND_CRASH, patches=append_any_owner),
    "append: the first index is not compared": Weakening(configuration=LATE, patches=append_anywhere),
    "append: a gap is accepted": Weakening(configuration=FAILOVER, patches=append_after_the_end),
    "take: the epoch is not compared": Weakening(configuration=LATE, patches=take_any_epoch),
    "take: the epoch does not rise": Weakening(configuration=LATE, patches=hand_over_at_the_same_epoch),
    "take: a bad connection needs no missed renewal": Weakening(configuration=LINKS, patches=take_without_evidence),
    "take: a lease is no protection": Weakening(configuration=BACK, patches=take_despite_the_lease),
    "take: the deadline is not compared": Weakening(
        configuration=CONFIGURATIONS["a deadline"], patches=take_past_the_deadline
    ),
    "take: whoever has left counts as crashed": Weakening(configuration=STOPS, patches=no_tombstones),
    "restart: takes do not freeze": Weakening(configuration=Configuration(faults={"restart": 1}), patches=no_freeze),
    "requeue: the epoch does not rise": Weakening(
        configuration=CONFIGURATIONS["workers refuse"], patches=requeue_at_the_same_epoch
    ),
    "requeue: the epoch is not compared": Weakening(configuration=QUEUED, patches=requeue_any_epoch),
    "finish: the epoch is not compared": Weakening(
        configuration=CONFIGURATIONS["workers refuse"], patches=finish_any_epoch
    ),
    "sweep: a claim does not end": Weakening(configuration=NOBODY, patches=claims_without_end),
    "attach: only the last router counts": Weakening(configuration=GUESTS, patches=one_attachment),
    "detach: every router is detached": Weakening(configuration=GUESTS, patches=detach_all),
    "mig_commit: nothing is compared": Weakening(configuration=MOVES, patches=commit_any_migration),
    "mig_commit: the length is not compared": Weakening(configuration=MOVES, patches=commit_any_length),
    "mig_commit: only the first branch is compared": Weakening(
        configuration=CONFIGURATIONS["migrations of two branches, their calls late"],
        patches=commit_compares_the_first_branch,
    ),
    "mig_abort: a commit is not noticed": Weakening(configuration=MOVE, patches=abort_after_a_commit),
    "mig_abort: the number is not used up": Weakening(configuration=MOVES, patches=abort_without_a_number),
    "mig_abort: nothing is noted": Weakening(configuration=MOVES, patches=abort_changes_nothing),
    "mig_begin: the number is not compared": Weakening(configuration=MOVES, patches=begin_any_number),
    "source: what was not answered counts as aborted": without("only the store says that a migration is over", MOVE),
    "source: the sequence runs on while it is handed over": without("a sequence stops before it is handed over", MOVE),
    "source: what has moved is taken back when it stops": Weakening(
        configuration=CONFIGURATIONS["a worker is told to stop while it moves a sequence"], patches=requeue_any_epoch
    ),
    "target: what it cannot run is not given back": without(
        "what moved and cannot run is given back",
        CONFIGURATIONS["a target gives back what it cannot run, and nobody else does"],
    ),
    "worker: tokens are sent before the journal has them": without("journal before delivery", ITEMS),
    "worker: an older admission replaces a newer one": without(
        "newest admission",
        alone(begins="queued", faults={"late": 1, "refuse": 1}, late=frozenset({"schedule"})),
    ),
    "worker: nobody gives back what was taken and not scheduled": without("reconcile", NOBODY),
    "router: the journal is read before the take": without(
        "journal read after the take", Configuration(faults={"stall": 1})
    ),
    "router: a call that ends early leaves an attachment": without("accept is shielded", NEW),
    "router: attachments are told once": without("attachments are told again", NEW),
    "router: a lapsed lease does not attach again": without("a lapsed lease attaches again", STALLED_ROUTER),
    "session: an index is delivered twice": without("each index once", ITEMS),
    "session: the chain of items is not compared": without("chain of items", FAILOVER),
    "session: a reading begins where the delivery is": without("readings begin where the last one ended", FAILOVER),
    "session: a new generation is not read from 0": without("new generation: read from 0", FAILOVER),
}

# Rules that the checker does not need for any promise in these bounds: another rule stands before them.
SECOND_LINES = {
    "append: what stands there is not compared": "an owner at its epoch never sends two tokens for one index, so this "
    "sees only defects of a worker or changed data",
    "take: a repeated call is not recognized": "the router takes FENCED for another one's success, and the owner gives "
    "back what it was never asked to run; the rule saves an epoch and that pause",
    "mig_commit: a repeated call is not recognized": "the target takes FENCED for a refusal, and gives back what the "
    "record says is its own; the rule saves that pause and a replay",
    "restart: takes freeze for less than a lease": "in the model every process renews its lease with each step of the "
    "time, so the length of the freeze does not show",
}

# Those that are seen within a second each, which `make test` runs.
QUICK = (
    "append: the first index is not compared",
    "append: a gap is accepted",
    "take: the epoch does not rise",
    "take: a bad connection needs no missed renewal",
    "take: the deadline is not compared",
    "take: whoever has left counts as crashed",
    "restart: takes do not freeze",
    "requeue: the epoch does not rise",
    "finish: the epoch is not compared",
    "attach: only the last router counts",
    "mig_commit: nothing is compared",
    "mig_abort: the number is not used up",
    "source: what was not answered counts as aborted",
    "source: the sequence runs on while it is handed over",
    "mig_begin: the number is not compared",
    "worker: tokens are sent before the journal has them",
    "worker: nobody gives back what was taken and not scheduled",
    "session: an index is delivered twice",
)
