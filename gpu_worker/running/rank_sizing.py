"""How many blocks a group has whose ranks have a device each: as many as the rank with the least room."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from gpu_worker.models.decoders.ranks.device_team import DeviceTeam
from gpu_worker.running.sizing import DeviceMemory, gpu_block_bytes

REHEARSED_BYTES = 32 << 20


class RehearsedMemory:
    """What a CPU says that pretends to be a GPU: steps are run, and take nothing."""

    total_bytes = REHEARSED_BYTES

    def free_bytes(self) -> int:
        return REHEARSED_BYTES

    def peak_of(self, work: Callable[[], object]) -> int:
        work()
        return 0

    def kept_by(self, work: Callable[[], object]) -> int:
        work()
        return 0


def agreed_blocks(team: DeviceTeam, own_blocks: int, host_blocks: int) -> tuple[int, int]:
    """Blocks on the devices and on the host, the same in all ranks: rank 0 decides on those on the host."""
    said = team.numbers_of_all([own_blocks, host_blocks])
    return min(blocks for blocks, _ in said), said[0][1]


def rank_block_bytes(
    memory: DeviceMemory,
    utilization: float,
    team: DeviceTeam,
    decoder: Any,
    layers: Sequence[Tensor],
    steps: Sequence[Callable[[], object]],
) -> int:
    """How many bytes of this rank's device blocks may take beside `steps`, which rank 0 runs and all compute.

    `layers` have one block. All ranks call it at the same time.
    """
    if team.place.rank == 0:
        work: list[Callable[[], object]] = [*steps, team.order_end]
    else:
        work = [partial(team.serve, decoder, layers, _unexpected, lambda used: None, lambda: None)]
    return gpu_block_bytes(memory, utilization, work, lambda: None)


def _unexpected(order: int, number: int, pairs: Sequence[tuple[int, int]]) -> None:
    raise RuntimeError(f"steps that are measured move no blocks, and here is the order {order}")
