"""The rules that every call must keep, whoever makes it and whenever. docs/protocol.md numbers the invariants."""

from typing import TYPE_CHECKING, Any

from octavo.request.record import SequenceState

if TYPE_CHECKING:
    from modelcheck.callers import Call, Callers, World

OF_AN_EPOCH = {"take", "requeue", "finish", "begin", "commit", "abort"}  # calls whose first argument is an epoch


def wrong_step(model: "Callers", before: "World", after: "World", call: "Call") -> str:
    """The rule that a call has broken; empty if none."""
    if any((*each[:2], "aborted") in after.verdicts for each in after.verdicts if each[2] == "committed"):
        return "I8: a migration was both committed and aborted"
    store = model.stores.view(after.store)
    if call[0] == "sweep" and any(until <= store.now_ms() for until in store.claims.values()):
        return "I13: a claim that is over keeps a sequence from the queue"
    was, now = model.record(before.store), model.record(after.store)
    if was is None or before.store == after.store:
        return ""
    if now is None:
        return "a record vanished"
    return (
        _wrong_journal(model, before, after)
        or _wrong_record(was, now, bool(_journals_differ(model, before, after)))
        or _wrong_state(model, after, now)
        or _wrong_call(model, before, was, now, call)
        or _wrong_verdict(after, was, now)
    )


def _journals_differ(model: "Callers", before: "World", after: "World") -> bool:
    return model.journals(before.store) != model.journals(after.store)


def _wrong_journal(model: "Callers", before: "World", after: "World") -> str:
    new = model.journals(after.store)
    if any(new[i][: len(each)] != each for i, each in enumerate(model.journals(before.store))):
        return "I1: the journal was rewritten"
    if any(model.contexts[token] != each[:i] for each in new for i, token in enumerate(each)):
        return "I3: a token of the journal was not computed from the tokens before it"
    if any(len(each) > model.configuration.num_tokens for each in new):
        return "I11: more than max_tokens"
    return ""


def _wrong_record(was: Any, now: Any, grew: bool) -> str:
    if now.epoch < was.epoch:
        return "I7: the epoch fell"
    if was.state.ended and ((now.state, now.finishes) != (was.state, was.finishes) or grew):
        return "an ended sequence changed"
    if now.epoch == was.epoch and not now.state.ended and (now.owner, now.state) != (was.owner, was.state):
        return "I5: the owner changed within an epoch"
    return ""


def _wrong_state(model: "Callers", after: "World", now: Any) -> str:
    state = model.stores.view(after.store)
    waits = now.seq_id in state.queue or now.seq_id in state.claims
    if (now.state is SequenceState.QUEUED) != waits:
        return f"I13: {now.state} and {'in' if waits else 'not in'} the queue"
    if now.state is SequenceState.RUNNING and not now.owner:
        return "I13: RUNNING without an owner"
    return ""


def _wrong_call(model: "Callers", before: "World", was: Any, now: Any, call: "Call") -> str:
    """What an owner decides has an effect at its epoch alone, and what a migration decides if it was begun."""
    kind, *args = call
    changed = (was.epoch, was.state, was.finishes) != (now.epoch, now.state, now.finishes)
    if kind == "append":
        worker, epoch = args[:2]
        if (worker, epoch) != (was.owner, was.epoch):
            return "I4: somebody else than the owner at its epoch wrote to the journal"
    elif kind in OF_AN_EPOCH and changed and args[0] != was.epoch:
        return f"I7: a {kind} about another epoch took effect"
    if kind == "commit" and now.epoch > was.epoch:
        epoch, number, target, lengths = args
        if (epoch, number, target) not in before.begun and not before.life:
            return "I8: a migration that was not begun was committed"
        if lengths != tuple(map(len, model.journals(before.store))):
            return "I8: a target that has not all tokens became the owner"
    if kind == "take" and now.epoch > was.epoch and model.stores.view(before.store).past_deadline(was):
        return "I14: a worker was given a sequence past its deadline"
    return ""


def _wrong_verdict(after: "World", was: Any, now: Any) -> str:
    if now.crashes > was.crashes and was.owner not in after.silent:
        return "a crash was counted of a worker that had not crashed"
    dropped = now.cancel > was.cancel or (now.state is SequenceState.CANCELLED and not was.cancel)
    if dropped and not was.state.ended and not after.cancelled and after.clients - after.silent:
        return "a request was cancelled while its client was attached"
    return ""
