"""What happens to calls under way, to the store and to the network."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from modelcheck.explorer import Step
from modelcheck.world import LEASE_MS, World

if TYPE_CHECKING:
    from modelcheck.system import System

OUTAGE_MS = LEASE_MS + 500


def steps(system: "System", world: World) -> Iterator[Step]:
    yield from late_calls(system, world)
    if world.has("restart"):
        away = system.tick(world.spend("restart"), OUTAGE_MS, store_away=True)
        yield Step("the store restarts", _restarted(system, away), progress=False)
    if world.has("failover"):
        yield from _fail_over(system, world)


def late_calls(system: "System", world: World) -> Iterator[Step]:
    for call in sorted(world.late, key=str):
        after, _, wrong = system.perform(world, call)
        yield Step(f"late: {system.text(call)}", after, progress=False, wrong=wrong)


def _restarted(system: "System", world: World) -> World:
    return world._replace(store=system.stores.apply(world.store, "restart", lambda state: state.restart()))


def _fail_over(system: "System", world: World) -> Iterator[Step]:
    """The replica has got everything up to some moment and nothing after it. Then it takes over."""
    if world.backup < 0:
        yield Step("the replica gets no more", world._replace(backup=world.store), progress=False)
        return
    generation = system.stores.view(world.store).generation
    lost = system.journal(world)
    old = world._replace(store=world.backup)
    number = system.stores.apply(
        old.store, ("fail over", generation), lambda state: setattr(state, "generation", generation)
    )
    after = _restarted(system, system.tick(old._replace(store=number), OUTAGE_MS, store_away=True))
    truth = world.truth
    after = after.spend("failover")._replace(backup=-1)
    after = after.with_truth(life=truth.life + 1, lost=truth.lost or lost != system.journal(after))
    yield Step("the replica takes over", after, progress=False)
