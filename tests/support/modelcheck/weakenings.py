"""The protocol with one rule left out at a time. The model checker must see each.

A rule is left out by a weaker function in the place of one in octavo.store.memory, which calls the real one with what
it would have refused made right.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from modelcheck.callers import Configuration
from modelcheck.configurations import CONFIGURATIONS

from octavo.store.calls import AppendStatus, MigrateStatus, TakeReason
from octavo.store.memory import MemoryState, MemoryStore, migration, ownership, store, sweep

Patches = list[tuple[Any, str, Any]]


@dataclass(frozen=True, kw_only=True)
class Weakening:
    """A store without one rule, and a configuration in which that shows."""

    configuration: Configuration
    patches: Callable[[], Patches]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The store of this process is the weaker one meanwhile."""
        with ExitStack() as stack:
            for where, name, weaker in self.patches():
                stack.enter_context(patch.object(where, name, weaker))
            yield


# ---- weaker functions of the store ---------------------------------------------------------------------------------


def weakens(where: Any, name: str) -> Callable[[Any], Callable[[], Patches]]:
    """What stands in the place of a function, and is given the real one before the arguments."""

    def decorate(weaker: Any) -> Callable[[], Patches]:
        def patches() -> Patches:
            real = getattr(where, name)
            return [(where, name, lambda *args, **how: weaker(real, *args, **how))]

        return patches

    return decorate


def constant(where: Any, name: str, value: Any) -> Callable[[], Patches]:
    """A function that always gives the same."""
    return lambda: [(where, name, lambda *_, **__: value)]


def record_of(state: MemoryState, seq_id: Any) -> Any:
    stored = state.get(seq_id)
    return None if stored is None else stored.record


@weakens(store, "append")
def append_any_epoch(real, state, owner, item):
    record = record_of(state, item.seq_id)
    return real(state, owner, replace(item, epoch=record.epoch) if record else item)


@weakens(store, "append")
def append_any_owner(real, state, owner, item):
    record = record_of(state, item.seq_id)
    return real(state, record.owner if record else owner, item)


@weakens(store, "append")
def append_of_anybody(real, state, owner, item):
    record = record_of(state, item.seq_id)
    return real(state, record.owner, replace(item, epoch=record.epoch)) if record else None


@weakens(store, "append")
def append_anywhere(real, state, owner, item):
    stored = state.get(item.seq_id)
    return real(state, owner, replace(item, first_index=len(stored.journals[0])) if stored else item)


@weakens(store, "append")
def append_after_the_end(real, state, owner, item):
    reply = real(state, owner, item)
    stored = state.get(item.seq_id)
    if reply.status is AppendStatus.GAP and stored is not None:  # the tokens between count as received
        stored.journals[0].extend(item.token_ids)
        return replace(reply, status=AppendStatus.OK)
    return reply


@weakens(ownership, "take_ownership")
def take_any_epoch(real, state, request):
    record = record_of(state, request.seq_id)
    return real(state, replace(request, expected_epoch=record.epoch) if record else request)


@weakens(ownership, "take_ownership")
def take_past_the_deadline(real, state, request):
    with patch.object(MemoryState, "past_deadline", lambda self, record: False):
        return real(state, request)


@weakens(ownership, "protected_ms")
def take_without_evidence(real, state, owner, reason):
    return 0 if reason is TakeReason.CONNECTION else real(state, owner, reason)


@weakens(ownership, "protected_ms")
def take_despite_the_lease(real, state, owner, reason):
    return 0 if reason is TakeReason.LEASE else real(state, owner, reason)


@weakens(ownership, "hand_over")
def hand_over_at_the_same_epoch(real, state, stored, owner, **how):
    epoch = stored.record.epoch
    real(state, stored, owner, **how)
    stored.record.epoch = max(epoch, 1)


@weakens(MemoryStore, "requeue")
async def requeue_at_the_same_epoch(real, self, seq_id, epoch):
    record = record_of(self.shared, seq_id)
    before = record.epoch if record else 0
    waits = await real(self, seq_id, epoch)
    if record is not None:
        record.epoch = before
    return waits


@weakens(MemoryStore, "requeue")
async def requeue_any_epoch(real, self, seq_id, epoch):
    record = record_of(self.shared, seq_id)
    return await real(self, seq_id, record.epoch if record else epoch)


@weakens(MemoryStore, "attach")
async def one_attachment(real, self, seq_id, router):
    if record := record_of(self.shared, seq_id):
        record.routers = ()
    return await real(self, seq_id, router)


@weakens(MemoryState, "detach")
def detach_all(real, self, stored, router, *how):
    for each in stored.record.routers:
        real(self, stored, each, *how)


@weakens(migration, "mig_commit")
def commit_any_migration(real, state, seq_id, epoch, number, target, num_tokens):
    if record := record_of(state, seq_id):
        record.mig_number, record.mig_to, epoch = number, target, record.epoch
    return real(state, seq_id, epoch, number, target, num_tokens)


@weakens(migration, "mig_commit")
def commit_any_length(real, state, seq_id, epoch, number, target, num_tokens):
    stored = state.get(seq_id)
    lengths = [len(each) for each in stored.journals] if stored else num_tokens
    return real(state, seq_id, epoch, number, target, lengths)


@weakens(migration, "mig_commit")
def commit_compares_the_first_branch(real, state, seq_id, epoch, number, target, num_tokens):
    stored = state.get(seq_id)
    others = [len(each) for each in stored.journals[1:]] if stored else []
    return real(state, seq_id, epoch, number, target, [*num_tokens[:1], *others])


@weakens(migration, "mig_abort")
def abort_after_a_commit(real, state, seq_id, epoch, number):
    reply = real(state, seq_id, epoch, number)
    return replace(reply, status=MigrateStatus.ABORTED) if reply.status is MigrateStatus.COMMITTED else reply


@weakens(migration, "mig_abort")
def abort_without_a_number(real, state, seq_id, epoch, number):
    record = record_of(state, seq_id)
    before = record.mig_number if record else 0
    reply = real(state, seq_id, epoch, number)
    if record is not None and not record.mig_to and record.mig_number == number:
        record.mig_number = min(before, number - 1)
    return reply


@weakens(migration, "mig_abort")
def abort_changes_nothing(real, state, seq_id, epoch, number):
    record = record_of(state, seq_id)
    before = (record.mig_number, record.mig_to) if record else None
    reply = real(state, seq_id, epoch, number)
    if record is not None and before is not None:
        record.mig_number, record.mig_to = before
    return reply


finish_any_epoch = constant(store, "of_this_epoch", True)
no_freeze = constant(MemoryState, "freeze_ms", 0)
no_tombstones = constant(ownership, "has_left", False)
claims_without_end = constant(sweep, "_requeue_claims", [])
begin_any_number = constant(migration, "outdated", False)


# ---- all of them ---------------------------------------------------------------------------------------------------


def seen(name: str, patches: Callable[[], Patches]) -> Weakening:
    return Weakening(configuration=CONFIGURATIONS[name], patches=patches)


PLAIN, LOST, MOVES, CLIENTS = "members fall silent", "a failover", "migrations", "two clients"

WEAKENINGS = {
    "append: neither epoch nor owner is compared": seen(PLAIN, append_of_anybody),
    "append: the epoch is not compared": seen(PLAIN, append_any_epoch),
    "append: the owner is not compared": seen(PLAIN, append_any_owner),
    "append: the first index is not compared": seen(PLAIN, append_anywhere),
    "append: a gap is accepted": seen(LOST, append_after_the_end),
    "take: the epoch is not compared": seen(PLAIN, take_any_epoch),
    "take: the epoch does not rise": seen(PLAIN, hand_over_at_the_same_epoch),
    "take: a bad connection needs no missed renewal": seen(PLAIN, take_without_evidence),
    "take: a lease is no protection": seen(PLAIN, take_despite_the_lease),
    "take: the deadline is not compared": seen("a deadline", take_past_the_deadline),
    "take: whoever has left counts as crashed": seen("workers are told to stop", no_tombstones),
    "restart: takes do not freeze": seen("the store restarts", no_freeze),
    "requeue: the epoch does not rise": seen(PLAIN, requeue_at_the_same_epoch),
    "requeue: the epoch is not compared": seen(PLAIN, requeue_any_epoch),
    "finish: the epoch is not compared": seen(PLAIN, finish_any_epoch),
    "sweep: a claim does not end": seen(PLAIN, claims_without_end),
    "attach: only the last router counts": seen(CLIENTS, one_attachment),
    "detach: every router is detached": seen(CLIENTS, detach_all),
    "mig_commit: nothing is compared": seen(MOVES, commit_any_migration),
    "mig_commit: the length is not compared": seen(MOVES, commit_any_length),
    "mig_commit: only the first branch is compared": seen(
        "migrations of two branches", commit_compares_the_first_branch
    ),
    "mig_abort: a commit is not noticed": seen(MOVES, abort_after_a_commit),
    "mig_abort: the number is not used up": seen(MOVES, abort_without_a_number),
    "mig_abort: nothing is noted": seen(MOVES, abort_changes_nothing),
    "mig_begin: the number is not compared": seen(MOVES, begin_any_number),
}

# Rules that no promise of the store needs in these bounds: another rule stands before them.
SECOND_LINES = {
    "append: what stands there is not compared": "an owner at its epoch never sends two tokens for one index, so this "
    "sees only defects of a worker or changed data",
    "take: a repeated call is not recognized": "the router takes FENCED for another one's success, and the owner gives "
    "back what it was never asked to run; the rule saves an epoch and that pause",
    "mig_commit: a repeated call is not recognized": "the target takes FENCED for a refusal, and gives back what the "
    "record says is its own; the rule saves that pause and a replay",
    "restart: takes freeze for less than a lease": "in the model every member renews its lease with each step of the "
    "time, so the length of the freeze does not show",
}
