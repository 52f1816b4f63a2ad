"""How much memory blocks get. The memory of a GPU is a stand-in here: no GPU has run this."""

from collections.abc import Callable

import pytest
import torch

from gpu_worker.running.sizing import CudaMemory, cpu_block_bytes, gpu_block_bytes, host_pool_bytes
from octavo.request.errors import InvalidArgument

GIB = 1 << 30


class StandInMemory:
    """A GPU of 80 GiB, of which weights have 20. A step and a capture take the bytes they return."""

    total_bytes = 80 * GIB

    def free_bytes(self) -> int:
        return 60 * GIB

    def peak_of(self, work: Callable[[], int]) -> int:
        return work()

    def kept_by(self, work: Callable[[], int]) -> int:
        return work()


def block_bytes(utilization: float, steps: tuple[int, ...] = (2 * GIB, 6 * GIB, 3 * GIB), captured: int = GIB) -> int:
    return gpu_block_bytes(StandInMemory(), utilization, [lambda step=step: step for step in steps], lambda: captured)


def test_blocks_get_what_weights_the_worst_step_and_graphs_leave_of_the_share():
    assert block_bytes(1.0) == (80 - 20 - 6 - 1) * GIB
    assert block_bytes(0.5) == (40 - 20 - 6 - 1) * GIB
    assert block_bytes(1.0, captured=0) - block_bytes(1.0, captured=5 * GIB) == 5 * GIB


def test_a_share_that_leaves_nothing_is_refused_with_the_numbers():
    with pytest.raises(InvalidArgument, match=r"gpu_memory_utilization: 0\.3 of 80\.00 GiB leaves nothing .* 20\.00 "):
        block_bytes(0.3)


def test_a_step_that_does_not_fit_names_its_settings():
    def too_large() -> int:
        raise torch.OutOfMemoryError("no")

    with pytest.raises(InvalidArgument, match=r"max_batch_tokens: .* --max-batch-sequences"):
        gpu_block_bytes(StandInMemory(), 0.9, [too_large], lambda: 0)


@pytest.mark.parametrize(("available", "blocks", "pool"), [(100, 1, 4), (20, 1, 2), (2, 0.5, 0.2), (0, 0, 0)])
def test_shares_of_the_host_s_memory(available, blocks, pool):
    assert cpu_block_bytes(available * GIB) == int(blocks * GIB)
    assert host_pool_bytes(available * GIB) == int(pool * GIB)


def test_what_torch_and_the_driver_say_is_put_together(monkeypatch):
    """The calls that CudaMemory makes, with a stand-in for torch.cuda: work takes 5, of which 2 stay until dropped."""
    state = {"allocated": 10, "peak": 99, "free": 100, "cached": 7}

    class Kept:
        pass

    def work() -> Kept:
        state["peak"] = state["allocated"] + 5
        state["free"] -= 2
        return Kept()

    def empty_cache() -> None:
        state["free"] += state["cached"]
        state["cached"] = 0

    stand_ins = {
        "reset_peak_memory_stats": lambda _: state.update(peak=state["allocated"]),
        "memory_allocated": lambda _: state["allocated"],
        "max_memory_allocated": lambda _: state["peak"],
        "synchronize": lambda _: None,
        "mem_get_info": lambda _: (state["free"], 200),
        "empty_cache": empty_cache,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    memory = CudaMemory(torch.device("cuda", 0))
    assert memory.total_bytes == 200
    assert memory.free_bytes() == 107, "what torch keeps is free"
    assert memory.peak_of(work) == 5
    assert memory.kept_by(work) == 2
