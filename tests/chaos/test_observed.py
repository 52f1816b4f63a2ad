"""What a process says of itself to the audit of a storm: also what is left of moves."""

from types import SimpleNamespace

from storm.observed import num_moves

from gpu_worker.blocks.block_manager import Reservation
from gpu_worker.migration.blocks.ticket_registry import TicketRegistry
from gpu_worker.scheduling.block_exchange import BlockImport, PinnedBlocks
from octavo.request.ids import BlockId


class NoManager:
    """Takes back every block."""

    def release(self, blocks: object) -> None:
        pass


def test_pins_and_imports_that_nobody_has_released_are_counted() -> None:
    before = num_moves()
    reservation = Reservation(NoManager(), [BlockId(1)])  # type: ignore[arg-type]
    pinned, held, registry = PinnedBlocks({}, reservation), BlockImport(reservation), TicketRegistry()
    never = SimpleNamespace(expires_at=float("inf"), has_ended=False)
    registry._tickets[1] = never  # type: ignore[assignment]  # only counted
    found = num_moves()
    assert {name: found[name] - before.get(name, 0) for name in ("pins", "held imports", "tickets")} == {
        "pins": 1,
        "held imports": 1,
        "tickets": 1,
    }
    reservation.blocks, held.released = [], True
    registry._tickets.clear()
    registry.close()
    assert num_moves() == before
    assert not pinned.blocks
