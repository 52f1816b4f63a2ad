"""The rules that every state, every change of the store and every call must keep.

docs/protocol.md numbers the invariants.
"""

from typing import TYPE_CHECKING, Any

from modelcheck.clients import LOST
from modelcheck.stored import NOW_MS
from modelcheck.world import LEASE_MS, Truth, Worker, World, gathered, worker_name

from octavo.request.record import SequenceState
from octavo.request.sampling import FinishReason
from octavo.store.calls import MigrateStatus

if TYPE_CHECKING:
    from modelcheck.system import Call, System


# ---- a state of the store ------------------------------------------------------------------------------------------


def wrong_store(system: "System", number: int) -> str:
    state = system.stores.view(number)
    stored = next(iter(state._entries.values()), None)
    if stored is None:
        return ""
    record, journal = stored.record, gathered(stored.journals)
    if system.tokens.misplaced(journal):
        return "I3: a token of the journal was not computed from the tokens before it"
    if any(len(each) > record.max_tokens for each in stored.journals):
        return "I11: more than max_tokens"
    waits = record.seq_id in state.queue or record.seq_id in state.claims
    if (record.state is SequenceState.QUEUED) != waits:
        return f"I13: {record.state} and {'in' if waits else 'not in'} the queue"
    if record.state is SequenceState.RUNNING and not record.owner:
        return "I13: RUNNING without an owner"
    return ""


# ---- a change of the store -----------------------------------------------------------------------------------------


def wrong_change(system: "System", before: int, after: int) -> str:
    old, new = (next(iter(system.stores.view(n)._entries.values()), None) for n in (before, after))
    if old is None:
        return ""
    if new is None:
        return "a record vanished"
    was, now = old.record, new.record
    if any(new.journals[i][: len(each)] != each for i, each in enumerate(old.journals)):
        return "I1: the journal was rewritten"
    if now.epoch < was.epoch:
        return "I7: the epoch fell"
    if was.state.ended and (now.state, now.finishes, new.journals) != (was.state, was.finishes, old.journals):
        return "an ended sequence changed"
    if now.owner != was.owner and now.owner and now.epoch == was.epoch:
        return "the owner changed within an epoch"
    return ""


def wrong_call(system: "System", before: World, after: World, call: "Call") -> str:
    was, now, truth = system.record(before), system.record(after), before.truth
    if was is None or now is None:
        return ""
    runs_on = _owner_runs_on(before, was)
    if now.crashes > was.crashes and (
        was.owner not in truth.faulty or (runs_on and _is_fresh(system, before, was.owner))
    ):
        return "a crash was counted of a worker that had not crashed"
    if runs_on and call[0] in ("take", "requeue") and call[1] != was.epoch and now.epoch > was.epoch:
        return "a sequence was taken from the worker that runs it by a call about an earlier epoch"
    if now.cancel > was.cancel or (now.state is SequenceState.CANCELLED and not was.state.ended and not was.cancel):
        router = before.client.router
        if not truth.cancelled and router >= 0 and before.routers[router].state == "up":
            return "a request was cancelled while its client was attached"
    if call[0] == "take" and now.epoch > was.epoch and system.is_late(before):
        return "I14: a worker was given a sequence past its deadline"
    if now.state is SequenceState.FAILED and not was.state.ended:
        return _wrong_failure(was, now, truth)
    return ""


def _owner_runs_on(world: World, record: Any) -> bool:
    """Whether the owner goes round, and runs the sequence at the record's epoch."""
    return any(
        worker.state == "up"
        and worker_name(i, worker.number) == record.owner
        and worker.run is not None
        and worker.run.epoch == record.epoch
        for i, worker in enumerate(world.workers)
    )


def _is_fresh(system: "System", world: World, owner: Any) -> bool:
    """Whether the owner has just renewed its lease."""
    return system.stores.view(world.store).lease_end(owner) - NOW_MS >= LEASE_MS


def _wrong_failure(was: Any, now: Any, truth: Any) -> str:
    what, _, epoch = now.failure.rpartition(" at ")
    if what == "history lost" and not truth.lost:
        return "a request ended with HISTORY_LOST although nothing was lost"
    if what and (int(epoch) != was.epoch or was.state is SequenceState.QUEUED):
        return "a request was ended by a process whose epoch had passed"
    return ""


def note_verdict(world: World, kind: str, args: list[Any], reply: Any) -> tuple[World, str]:
    """Keeps how a migration ended. Of commit and abort, exactly one takes effect, whatever is late."""
    if kind not in ("commit", "abort"):
        return world, ""
    epoch, migration = args[:2]
    done = reply.status in (MigrateStatus.OK, MigrateStatus.SAME)
    verdict = "committed" if done or reply.status is MigrateStatus.COMMITTED else ""
    verdict = "aborted" if reply.status is MigrateStatus.ABORTED else verdict
    other = {"committed": "aborted", "aborted": "committed"}.get(verdict, "")
    if (epoch, migration, other) in world.truth.verdicts and not world.truth.life:
        return world, f"migration {migration} was {verdict} after it was {other}"
    if not verdict:
        return world, ""
    return world.with_truth(verdicts=world.truth.verdicts | {(epoch, migration, verdict)}), ""


# ---- a state of the service ----------------------------------------------------------------------------------------


def wrong_world(system: "System", world: World) -> str:
    client, record, truth = world.client, system.record(world), world.truth
    if system.tokens.misplaced(client.tokens):
        return "I3: the client got a token that was not computed from the tokens before it"
    if not truth.life:
        if record is not None and client.tokens != system.journal(world)[: len(client.tokens)]:
            return "I2: what the client got is no prefix of the journal"
        if record is not None and _num_running(world, record.epoch) > 1:
            return "I5: two workers run the sequence at the record's epoch"
        if any(_runs_what_has_moved(worker, truth) for worker in world.workers):
            return "I8: the source computes a sequence that has moved away"
        if record is not None and record.state is SequenceState.RUNNING and record.epoch == truth.admitted:
            owners = [w for i, w in enumerate(world.workers) if worker_name(i, w.number) == record.owner]
            if any(w.state == "up" and (w.run is None or w.run.epoch < record.epoch) for w in owners):
                return "a worker has admitted a sequence and runs it no more"
    return _wrong_end(system, world, record)


def _runs_what_has_moved(worker: Worker, truth: Truth) -> bool:
    run = worker.run
    if run is None or run.mode != "runs" or worker.state != "up":
        return False
    return any((epoch, verdict) == (run.epoch, "committed") for epoch, _, verdict in truth.verdicts)


def _num_running(world: World, epoch: int) -> int:
    return sum(bool(w.run and w.run.epoch == epoch and w.run.mode == "runs") for w in world.workers)


def _wrong_end(system: "System", world: World, record: Any) -> str:
    client, truth = world.client, world.truth
    if client.end in (LOST, "NOT_FOUND") and not (truth.lost or (client.end == "NOT_FOUND" and truth.life)):
        return f"the client was told {client.end} although nothing was lost"
    if client.end == FinishReason.LENGTH.name and len(client.tokens) != system.configuration.num_tokens:
        return "I2: the client was told LENGTH without all tokens"
    if client.end == FinishReason.CANCELLED.name and record is not None and record.state is not SequenceState.CANCELLED:
        return "the client was told CANCELLED of a request that was not"
    return ""
