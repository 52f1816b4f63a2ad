"""The protocol with one rule left out at a time. The model checker must see each.

A rule is left out by a weaker function in the place of one in octavo.store.memory, which calls the real one with what
it would have refused made right.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
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


def righted(where: Any, name: str, fix: Callable[..., tuple[Any, ...]]) -> Callable[[], Patches]:
    """A function that gets other arguments about a sequence that there is: `fix` makes right what would be refused."""

    @weakens(where, name)
    def weaker(real, first, *args):
        stored = getattr(first, "shared", first).get(getattr(args[-1], "seq_id", args[0]))
        return real(first, *(fix(stored, *args) if stored is not None else args))

    return weaker


@weakens(store, "append")
def append_after_the_end(real, state, owner, item):
    reply = real(state, owner, item)
    stored = state.get(item.seq_id)
    if reply.status is AppendStatus.GAP and stored is not None:  # the tokens between count as received
        stored.journals[0].extend(item.token_ids)
        return replace(reply, status=AppendStatus.OK)
    return reply


@weakens(store, "append")
def append_of_a_buddy(real, state, owner, item):
    stored = state.get(item.seq_id)
    if stored is not None and not state.lease_alive(stored.record.owner):  # who has its blocks goes on
        owner = stored.record.owner
    return real(state, owner, item)


@weakens(ownership, "take_ownership")
def take_past_the_deadline(real, state, request):
    with patch.object(MemoryState, "past_deadline", lambda self, record: False):
        return real(state, request)


def unprotected(reason: TakeReason) -> Callable[[], Patches]:
    """A take for this reason needs no evidence."""
    return weakens(ownership, "protected_ms")(
        lambda real, state, owner, why: 0 if why is reason else real(state, owner, why)
    )


@weakens(ownership, "hand_over")
def hand_over_at_the_same_epoch(real, state, stored, owner, **how):
    epoch = stored.record.epoch
    real(state, stored, owner, **how)
    stored.record.epoch = max(epoch, 1)


@weakens(MemoryStore, "requeue")
async def requeue_at_the_same_epoch(real, self, seq_id, epoch):
    stored = self.shared.get(seq_id)
    before = stored.record.epoch if stored else 0
    waits = await real(self, seq_id, epoch)
    if stored is not None:
        stored.record.epoch = before
    return waits


@weakens(MemoryStore, "attach")
async def one_attachment(real, self, seq_id, router):
    if stored := self.shared.get(seq_id):
        stored.record.routers = ()
    return await real(self, seq_id, router)


@weakens(MemoryState, "detach")
def detach_all(real, self, stored, router, *how):
    for each in stored.record.routers:
        real(self, stored, each, *how)


def any_migration(stored: Any, seq_id: Any, epoch: int, number: int, target: Any, num_tokens: Any) -> tuple[Any, ...]:
    stored.record.mig_number, stored.record.mig_to = number, target
    return seq_id, stored.record.epoch, number, target, num_tokens


def own_migration(stored: Any, seq_id: Any, epoch: int, number: int, target: Any, num_tokens: Any) -> tuple[Any, ...]:
    stored.record.mig_number, stored.record.mig_to = number, target
    return seq_id, epoch, number, target, num_tokens


@weakens(migration, "mig_abort")
def abort_after_a_commit(real, state, seq_id, epoch, number):
    reply = real(state, seq_id, epoch, number)
    return replace(reply, status=MigrateStatus.ABORTED) if reply.status is MigrateStatus.COMMITTED else reply


@weakens(migration, "mig_abort")
def abort_without_a_number(real, state, seq_id, epoch, number):
    stored = state.get(seq_id)
    before = stored.record.mig_number if stored else 0
    reply = real(state, seq_id, epoch, number)
    if stored is not None and not stored.record.mig_to and stored.record.mig_number == number:
        stored.record.mig_number = min(before, number - 1)
    return reply


@weakens(migration, "mig_abort")
def abort_changes_nothing(real, state, seq_id, epoch, number):
    stored = state.get(seq_id)
    before = (stored.record.mig_number, stored.record.mig_to) if stored else None
    reply = real(state, seq_id, epoch, number)
    if before is not None:
        stored.record.mig_number, stored.record.mig_to = before
    return reply


# ---- all of them ---------------------------------------------------------------------------------------------------


def seen(name: str, patches: Callable[[], Patches]) -> Weakening:
    return Weakening(configuration=CONFIGURATIONS[name], patches=patches)


PLAIN, LEFT, LOST = "members fall silent", "workers are told to stop", "a failover"
MOVES, CLIENTS, STANDBY = "migrations", "two clients", "a standby"
append = partial(righted, store, "append")
commit = partial(righted, migration, "mig_commit")

WEAKENINGS = {
    "append: neither epoch nor owner is compared": seen(
        PLAIN, append(lambda s, owner, item: (s.record.owner, replace(item, epoch=s.record.epoch)))
    ),
    "append: the epoch is not compared": seen(
        PLAIN, append(lambda s, owner, item: (owner, replace(item, epoch=s.record.epoch)))
    ),
    "append: the owner is not compared": seen(PLAIN, append(lambda s, owner, item: (s.record.owner, item))),
    "append: the first index is not compared": seen(
        PLAIN, append(lambda s, owner, item: (owner, replace(item, first_index=len(s.journals[0]))))
    ),
    "append: a gap is accepted": seen(LOST, append_after_the_end),
    "append: a buddy needs no take when the lease is over": seen(STANDBY, append_of_a_buddy),
    "take: the epoch is not compared": seen(
        PLAIN,
        righted(ownership, "take_ownership", lambda s, asked: (replace(asked, expected_epoch=s.record.epoch),)),
    ),
    "take: the epoch does not rise": seen(PLAIN, hand_over_at_the_same_epoch),
    "take: a bad connection needs no missed renewal": seen(PLAIN, unprotected(TakeReason.CONNECTION)),
    "take: a lease is no protection": seen(PLAIN, unprotected(TakeReason.LEASE)),
    "take: the deadline is not compared": seen("a deadline", take_past_the_deadline),
    "take: whoever has left counts as crashed": seen(
        "workers are told to stop", constant(ownership, "has_left", False)
    ),
    "take: a buddy goes on from its blocks and reads no journal": Weakening(
        configuration=replace(CONFIGURATIONS[STANDBY], reads_journal=False), patches=list
    ),
    "restart: takes do not freeze": seen("the store restarts", constant(MemoryState, "freeze_ms", 0)),
    "requeue: the epoch does not rise": seen(PLAIN, requeue_at_the_same_epoch),
    "requeue: the epoch is not compared": seen(
        PLAIN, righted(MemoryStore, "requeue", lambda s, seq_id, epoch: (seq_id, s.record.epoch))
    ),
    "finish: the epoch is not compared": seen(PLAIN, constant(store, "of_this_epoch", True)),
    "sweep: a claim does not end": seen(PLAIN, constant(sweep, "_requeue_claims", [])),
    "attach: only the last router counts": seen(CLIENTS, one_attachment),
    "detach: every router is detached": seen(CLIENTS, detach_all),
    "mig_commit: nothing is compared": seen(MOVES, commit(any_migration)),
    "mig_commit: a buddy commits what the owner has not begun": seen(STANDBY, commit(own_migration)),
    "mig_commit: the length is not compared": seen(
        MOVES, commit(lambda s, *args: (*args[:-1], [len(each) for each in s.journals]))
    ),
    "mig_commit: only the first branch is compared": seen(
        "migrations of two branches",
        commit(lambda s, *args: (*args[:-1], [*args[-1][:1], *(len(each) for each in s.journals[1:])])),
    ),
    "mig_abort: a commit is not noticed": seen(MOVES, abort_after_a_commit),
    "mig_abort: the number is not used up": seen(MOVES, abort_without_a_number),
    "mig_abort: nothing is noted": seen(MOVES, abort_changes_nothing),
    "mig_begin: the number is not compared": seen(MOVES, constant(migration, "outdated", False)),
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
