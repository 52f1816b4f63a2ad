"""What a worker does: it computes, journals, migrates, stops, and comes back as a new process."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from modelcheck.explorer import Step
from modelcheck.world import Run, World, worker_name

from octavo.request.record import SequenceState
from octavo.request.sampling import FinishReason
from octavo.store.calls import AppendStatus, MigrateStatus

if TYPE_CHECKING:
    from modelcheck.system import System

ACCEPTED = (AppendStatus.OK, AppendStatus.OK_CANCEL, AppendStatus.DUP)


def steps(system: "System", world: World, index: int) -> Iterator[Step]:
    worker = world.workers[index]
    name = worker_name(index, worker.number)
    if worker.state == "down":
        yield _restart(system, world, index)
        return
    if world.has("crash"):
        down = world.spend("crash").with_worker(index, state="down", run=None, known=0, offer=None, returns=0)
        yield Step(f"{name} crashes", _faulty(down, name), progress=False)
    if worker.state == "stalled":
        yield Step(f"{name} goes on", world.with_worker(index, state="up"), progress=False)
        return
    if world.has("stall"):
        stalled = world.spend("stall").with_worker(index, state="stalled")
        yield Step(f"{name} stands still", _faulty(stalled, name), progress=False)
    if worker.state == "leaving":
        yield from _leave(system, world, index)
        return
    if world.has("leave"):
        yield Step(f"{name} is told to stop", world.spend("leave").with_worker(index, state="leaving"), progress=False)
    if system.keeps("reconcile"):
        yield from _reconcile(system, world, index)
    if worker.run is not None:
        yield from _run(system, world, index, worker.run)
    if worker.offer is not None:
        yield from _commit(system, world, index)
    if worker.returns and system.keeps("what moved and cannot run is given back"):
        yield from system.issue(
            world, name, ("requeue", worker.returns), lambda after, _: after.with_worker(index, returns=0)
        )


def _faulty(world: World, name: str) -> World:
    return world.with_truth(faulty=world.truth.faulty | {name})


def _restart(system: "System", world: World, index: int) -> Step:
    number = world.workers[index].number + 1
    name = worker_name(index, number)
    after, _, wrong = system.perform(world, ("heartbeat", name))
    return Step(f"{name} starts", after.with_worker(index, number=number, state="up"), wrong=wrong)


def _end_run(world: World, index: int) -> World:
    worker = world.workers[index]
    known = max(worker.known, worker.run.epoch if worker.run else 0)
    return world.with_worker(index, run=None, known=known)


def _leave(system: "System", world: World, index: int) -> Iterator[Step]:
    """A worker that stops gives its sequence back, also one that moves, and then leaves a tombstone."""
    worker = world.workers[index]
    name = worker_name(index, worker.number)
    if worker.run is not None:
        if worker.run.mode in ("runs", "moves"):
            yield from system.issue(world, name, ("requeue", worker.run.epoch), lambda after, _: _end_run(after, index))
        yield Step(f"{name} drops its sequence", _end_run(world, index))
        return
    yield from system.issue(
        world,
        name,
        ("leave", name),
        lambda after, _: after.with_worker(index, state="down", known=0, offer=None, returns=0),
    )


def _reconcile(system: "System", world: World, index: int) -> Iterator[Step]:
    """A worker gives back what the record says is its own and it does not run. A Schedule is faster than that."""
    worker, record = world.workers[index], system.record(world)
    name = worker_name(index, worker.number)
    if record is None or record.state is not SequenceState.RUNNING or record.owner != name:
        return
    if worker.run is not None and worker.run.epoch >= record.epoch:
        return
    if any(router.state == "up" and router.task and router.task.stage == "schedule" for router in world.routers):
        return
    yield from system.issue(world, name, ("requeue", record.epoch), lambda after, _: after)


def _run(system: "System", world: World, index: int, run: Run) -> Iterator[Step]:
    name = worker_name(index, world.workers[index].number)
    if run.mode == "cancels":
        call = ("append", name, run.epoch, len(run.log), (), FinishReason.CANCELLED)
        yield from system.issue(world, name, call, lambda after, _: _end_run(after, index))
    elif run.mode == "breaks":
        call = ("finish", FinishReason.ERROR, f"history lost at {run.epoch}", run.epoch)
        yield from system.issue(world, name, call, lambda after, _: _end_run(after, index))
    elif run.mode == "moves":
        call = ("abort", run.epoch, run.moves)
        yield from system.issue(world, name, call, lambda after, reply: _aborted(after, index, reply))
        if not system.keeps("only the store says that a migration is over"):
            yield Step(f"{name} goes on without an answer", world.with_worker(index, run=run._replace(mode="runs")))
    else:
        yield from _compute(system, world, index, run)
        yield from _send_item(system, world, index, run)
        yield from _migrate(system, world, index, run)


def compute(system: "System", index: int, number: int, run: Run, count: int) -> tuple[int, ...]:
    """The next tokens of a run. They depend on who computes them, so that two workers never agree by chance."""
    log = run.log
    for _ in range(count):
        log += (system.tokens.next(log, index, number, run.epoch, run.life),)
    return log[len(run.log) :]


def _compute(system: "System", world: World, index: int, run: Run) -> Iterator[Step]:
    c, number = system.configuration, world.workers[index].number
    name = worker_name(index, number)
    if system.is_late(world):
        call = ("append", name, run.epoch, len(run.log), (), FinishReason.DEADLINE)
        yield from system.issue(world, name, call, lambda after, _: _end_run(after, index))
        return
    for count in range(1, min(c.most_at_once, c.num_tokens - len(run.log)) + 1):
        tokens = compute(system, index, number, run, count)
        at_end = len(run.log) + count == c.num_tokens and not c.endless
        call = ("append", name, run.epoch, len(run.log), tokens, FinishReason.LENGTH if at_end else FinishReason.NONE)
        yield from system.delay(world, name, call)
        after, reply, wrong = system.perform(world, call)
        if reply.status is AppendStatus.GAP and not wrong:  # the log has every token that the journal has lost
            *_, tokens, finish = call
            call = ("append", name, run.epoch, reply.length, run.log[reply.length :] + tokens, finish)
            after, reply, wrong = system.perform(world, call)
        what = f"{name}: {system.text(call)} → {reply.status}"
        yield Step(what, after if wrong else _appended(after, index, call, reply.status), wrong=wrong)


def _appended(world: World, index: int, call: tuple[Any, ...], status: AppendStatus) -> World:
    *_, first, tokens, finish = call
    run = world.workers[index].run
    if run is None:
        raise RuntimeError("a worker without a sequence has appended")
    if status in ACCEPTED:
        mode = "cancels" if status is AppendStatus.OK_CANCEL else "runs"
        world = world.with_worker(index, run=run._replace(log=run.log[:first] + tokens, mode=mode))
        return _end_run(world, index) if finish else world
    if status is AppendStatus.CONFLICT:
        return world.with_worker(index, run=run._replace(mode="breaks"))
    return _end_run(world, index)


def _send_item(system: "System", world: World, index: int, run: Run) -> Iterator[Step]:
    """A worker tells its followers: of the last token, or of all (a router has asked for them)."""
    if not world.has("item"):
        return
    name, log = worker_name(index, world.workers[index].number), run.log
    if not system.keeps("journal before delivery") and len(log) < system.configuration.num_tokens:
        log += compute(system, index, world.workers[index].number, run, 1)
    for first in {len(log) - 1, 0} if log else ():
        yield from system.delay(world, name, ("item", first, log[first:]), "item")


def _migrate(system: "System", world: World, index: int, run: Run) -> Iterator[Step]:
    worker, other = world.workers[index], world.workers[1 - index]
    name, target = worker_name(index, worker.number), worker_name(1 - index, other.number)
    if run.moves and other.state == "up" and other.offer is None and world.has("migrate"):
        # Live copy is over: the sequence stops, and the target gets the rest.
        stopped = run._replace(mode="moves") if system.keeps("a sequence stops before it is handed over") else run
        moving = world.spend("migrate").with_worker(index, run=stopped)
        yield Step(f"{name} hands over", moving.with_worker(1 - index, offer=(run.epoch, run.moves, run.log)), False)
    if run.moves and world.has("migrate"):
        # Given up before Finish: the target was not asked to become the owner, so the sequence runs on meanwhile.
        call = ("abort", run.epoch, run.moves)
        yield from system.issue(
            world.spend("migrate"), name, call, lambda after, reply: _aborted(after, index, reply), progress=False
        )
    if world.has("migrate") and run.moves < system.configuration.faults["migrate"]:
        number = run.moves + 1
        yield from system.issue(
            world,
            name,
            ("begin", run.epoch, number, target),
            lambda after, reply: _begun(after, index, number, reply.status),
            progress=False,
        )


def _begun(world: World, index: int, number: int, status: MigrateStatus) -> World:
    run = world.workers[index].run
    if run is None or status not in (MigrateStatus.OK, MigrateStatus.SAME):
        return world
    return world.with_worker(index, run=run._replace(moves=number))


def _aborted(world: World, index: int, reply: Any) -> World:
    run = world.workers[index].run
    if run is not None and reply.status not in (MigrateStatus.COMMITTED, MigrateStatus.FENCED):
        # CLOSED and GONE, too: the next append says that the sequence has ended.
        return world.with_worker(index, run=run._replace(mode="runs"))
    return _end_run(world, index)


def _commit(system: "System", world: World, index: int) -> Iterator[Step]:
    worker = world.workers[index]
    name = worker_name(index, worker.number)
    if worker.offer is None:
        return
    epoch, migration, log = worker.offer
    yield Step(f"{name} drops the ticket", world.with_worker(index, offer=None), progress=False)
    yield from system.issue(
        world,
        name,
        ("commit", epoch, migration, name, len(log)),
        lambda after, reply: _committed(after, index, reply),
    )
    if world.has("refuse"):
        yield from system.issue(
            world.spend("refuse"),
            name,
            ("commit", epoch, migration, name, len(log)),
            lambda after, reply: _gives_back(after, index, reply),
            progress=False,
        )


def _committed(world: World, index: int, reply: Any) -> World:
    worker = world.workers[index]
    if worker.offer is None:
        return world
    _, _, log = worker.offer
    newest = max(worker.known, worker.run.epoch if worker.run else 0)
    if reply.status in (MigrateStatus.OK, MigrateStatus.SAME) and newest < reply.epoch:
        world = world.with_worker(index, run=Run(reply.epoch, world.truth.life, log))
    return world.with_worker(index, offer=None)


def _gives_back(world: World, index: int, reply: Any) -> World:
    """The target owns the sequence now, and cannot run it."""
    done = reply.status in (MigrateStatus.OK, MigrateStatus.SAME)
    return world.with_worker(index, offer=None, returns=reply.epoch if done else 0)


def admit(
    system: "System", world: World, index: int, number: int, epoch: int, life: int, journal: tuple[int, ...]
) -> tuple[World, str]:
    """A worker's answer to a Schedule; "failed" if there is no such process any more, or it does not answer."""
    worker = world.workers[index]
    if worker.state != "up" or worker.number != number:
        return world, "gone" if worker.state == "down" or worker.number != number else "failed"
    newest = max(worker.known, worker.run.epoch if worker.run else 0)
    if newest == epoch:
        return world, "admitted"
    if newest > epoch and system.keeps("newest admission"):
        return world, "stale"
    return world.with_worker(index, run=Run(epoch, life, journal)), "admitted"
