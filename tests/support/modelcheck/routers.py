"""What a router does for sequences: it takes them from the queue or from lost owners, and schedules them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from modelcheck.explorer import Step
from modelcheck.world import LEASE_MS, Task, World, router_name, worker_name

from octavo.request.record import Record, SequenceState
from octavo.request.sampling import FinishReason
from octavo.store.calls import TakeReason, TakeStatus

if TYPE_CHECKING:
    from modelcheck.system import System

# Until then a router may choose a worker that stands still. Later it has heard that the worker does not answer: without
# this, the sequence could be given to that worker and back for ever, each time at higher epochs.
BLIND_EPOCHS = 2


def steps(system: "System", world: World, index: int) -> Iterator[Step]:
    router = world.routers[index]
    name = router_name(index, router.number)
    if router.state == "down":
        yield _restart(system, world, index)
        return
    if world.has("router crash"):
        yield Step(f"{name} crashes", _down(world.spend("router crash"), index), progress=False)
    if router.state == "stalled":
        yield Step(f"{name} goes on", world.with_router(index, state="up"), progress=False)
        return
    if world.has("router stall"):
        yield Step(
            f"{name} stands still", world.spend("router stall").with_router(index, state="stalled"), progress=False
        )
    if router.telling:
        call = attachment_call(world, index)
        yield from system.issue(world, name, call, lambda after, _: after.with_router(index, telling=False))
    if router.guest:
        left = world.with_router(index, guest=False, telling=True)
        yield Step(f"the other client leaves {name}", left, progress=False)
    elif world.has("guest") and world.client.router == 1 - index and system.record(world) is not None:
        after, _, wrong = system.perform(world.spend("guest"), ("attach", name))
        yield Step(f"{name}: another client attaches", after.with_router(index, guest=True), False, wrong)
    if router.task is None and index < system.configuration.num_routers:
        yield from _find_work(system, world, index)
    elif router.task is None:
        return
    elif router.task.stage == "take":
        yield from _take(system, world, index, router.task)
    elif router.task.stage == "fail":
        call = ("finish", FinishReason.ERROR, f"refused at {router.task.epoch}", router.task.epoch)
        yield from system.issue(world, name, call, lambda after, _: after.with_router(index, task=None))
    else:
        yield from _schedule(system, world, index, router.task)


def _down(world: World, index: int) -> World:
    world = world.with_router(index, state="down", task=None, telling=False, guest=False)
    return world.with_client(router=-1) if world.client.router == index else world


def _restart(system: "System", world: World, index: int) -> Step:
    from modelcheck.system import router_member

    number = world.routers[index].number + 1
    store, _ = system.stores.call(world.store, "heartbeat", router_member(router_name(index, number)), LEASE_MS)
    after = world._replace(store=store).with_router(index, number=number, state="up")
    return Step(f"{router_name(index, number)} starts", after)


def attachment_call(world: World, index: int) -> tuple[Any, ...]:
    """What a router tells the store: it is attached if and only if it has a client."""
    return ("attach" if world.is_attached(index) else "detach", router_name(index, world.routers[index].number))


def _find_work(system: "System", world: World, index: int) -> Iterator[Step]:
    router, record = world.routers[index], system.record(world)
    name = router_name(index, router.number)

    def begin(after: World, epoch: int, reason: TakeReason) -> World:
        journal = None if system.keeps("journal read after the take") else system.journal(after)
        return after.with_router(index, task=Task("take", epoch, reason, journal=journal))

    after, report, wrong = system.perform(world, ("sweep",))
    if report.orphans:
        yield Step(f"{name} finds an orphan", begin(after, report.orphans[0].epoch, TakeReason.LEASE), wrong=wrong)
    else:
        yield Step(f"{name} sweeps", after, wrong=wrong)
    if record is None or record.state.ended:
        return
    if record.state is SequenceState.QUEUED:
        yield from system.issue(
            world,
            name,
            ("pop", name),
            lambda after, popped: begin(after, popped[0].record.epoch, TakeReason.QUEUED) if popped else after,
        )
        return
    owner = _owner(world, record)
    if owner is None:
        yield Step(f"{name} has lost the owner", begin(world, record.epoch, TakeReason.CONNECTION))
        return
    if world.has("bad link"):
        lost = begin(world.spend("bad link"), record.epoch, TakeReason.CONNECTION)
        yield Step(f"{name} has lost its connection to the owner", lost, progress=False)
    run = world.workers[owner].run
    if world.client.router == index and (run is None or run.epoch < record.epoch) and not _being_scheduled(world):
        # The owner says for seconds that it does not know the sequence.
        yield Step(f"{name} hears that the owner has it not", begin(world, record.epoch, TakeReason.REFUSED))


def _owner(world: World, record: Record) -> int | None:
    """The worker that is the record's owner; None if that process has ended."""
    for index, worker in enumerate(world.workers):
        if worker.state != "down" and worker_name(index, worker.number) == record.owner:
            return index
    return None


def _being_scheduled(world: World) -> bool:
    return any(router.state == "up" and router.task and router.task.stage == "schedule" for router in world.routers)


def _take(system: "System", world: World, index: int, task: Task) -> Iterator[Step]:
    router, record = world.routers[index], system.record(world)
    name = router_name(index, router.number)
    owner = _owner(world, record) if record else None
    nobody = True
    for w, worker in enumerate(world.workers):
        if (
            worker.state in ("down", "leaving")
            or (worker.state == "stalled" and task.epoch > BLIND_EPOCHS)
            or (w == owner and task.reason is not TakeReason.QUEUED)
            or w == task.worker
        ):
            continue
        nobody = False
        take_id = f"{name}.{task.epoch}.{w}{worker.number}"
        call = ("take", task.epoch, worker_name(w, worker.number), take_id, task.reason)
        to = task._replace(worker=w, number=worker.number)
        yield from system.issue(world, name, call, lambda after, reply, to=to: _taken(after, index, to, reply))
    if task.reason in (TakeReason.QUEUED, TakeReason.REFUSED):
        call = ("requeue", task.epoch)
        yield from system.issue(world, name, call, lambda after, _: after.with_router(index, task=None))
    elif nobody:
        yield Step(f"{name} finds no worker", world.with_router(index, task=None))


def _taken(world: World, index: int, task: Task, reply: Any) -> World:
    if reply.status not in (TakeStatus.OK, TakeStatus.SAME):
        return world.with_router(index, task=None)
    journal = () if task.reason is TakeReason.QUEUED and task.journal is None else task.journal
    return world.with_router(
        index,
        task=Task("schedule", reply.epoch, TakeReason.REFUSED, task.worker, task.number, journal),
    )


def _schedule(system: "System", world: World, index: int, task: Task) -> Iterator[Step]:
    name, record = router_name(index, world.routers[index].number), system.record(world)
    if record is None or record.state is not SequenceState.RUNNING or record.epoch != task.epoch:
        yield Step(f"{name} leaves it to another", world.with_router(index, task=None))
        return
    journal = system.journal(world) if system.keeps("journal read after the take") else task.journal or ()
    call = ("schedule", task.worker, task.number, task.epoch, world.truth.life, journal)
    worker = world.workers[task.worker]

    def answered(after: World, answer: str) -> World:
        if answer == "admitted":
            after = after.with_truth(admitted=max(task.epoch, after.truth.admitted))
        if answer in ("admitted", "stale"):
            return after.with_router(index, task=None)
        return _refused(after, index, task, TakeReason.CONNECTION if answer == "gone" else TakeReason.REFUSED)

    yield from system.issue(world, name, call, answered)
    who = worker_name(task.worker, task.number)
    if worker.state == "up" and worker.number == task.number:
        if world.has("refuse"):
            refused = _refused(world.spend("refuse"), index, task, TakeReason.REFUSED)
            yield Step(f"{who} does not admit it now", refused, progress=False)
        if world.has("reject"):
            fails = world.spend("reject").with_router(index, task=Task("fail", task.epoch, TakeReason.REFUSED))
            yield Step(f"{who} says that it can never hold it", fails, progress=False)


def _refused(world: World, index: int, task: Task, reason: TakeReason) -> World:
    return world.with_router(index, task=Task("take", task.epoch, reason, task.worker, task.number, task.journal))
