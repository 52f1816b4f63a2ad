"""Columns of uneven shares are joined side by side, and NCCL's process group is made as it is to be."""

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_worker.group.shared_memory import SharedMemory
from gpu_worker.models.decoders.ranks import column_exchange
from gpu_worker.models.decoders.ranks.column_exchange import ColumnExchange


def place_of(rank: int, size: int, meeting: int) -> Any:
    return SimpleNamespace(rank=rank, size=size, meeting=meeting, patience_s=20.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", [(4, 4, 4), (16, 0, 3), (1, 2, 5)])
def test_columns_are_joined_in_the_order_of_ranks(dtype: torch.dtype, widths: tuple[int, ...]) -> None:
    whole = [torch.randn(rows, sum(widths)).to(dtype) for rows in (1, 7, 0)]
    device = torch.device("cpu")
    with SharedMemory.create("meeting") as meeting, ThreadPoolExecutor(len(widths)) as ranks:

        def run(rank: int) -> None:
            exchange = ColumnExchange(place_of(rank, len(widths), meeting.descriptor), device)
            assert exchange.numbers_of_all([rank, 7]) == [[each, 7] for each in range(len(widths))]
            for states in whole:
                own = states.split(widths, dim=1)[rank]  # not contiguous, as a decoder's views are
                joined = exchange.join(own, widths)
                assert joined.is_contiguous() and torch.equal(joined, states)
            exchange.close()

        assert list(ranks.map(run, range(len(widths)))) == [None] * len(widths)


def test_a_file_that_gets_the_number_of_the_meeting_is_left_alone(tmp_path: Path) -> None:
    """Torch's store writes once more at its end, into what the name stands for then."""
    before = len(os.listdir("/proc/self/fd"))
    with SharedMemory.create("meeting") as meeting, ThreadPoolExecutor(2) as ranks:
        places = [place_of(rank, 2, meeting.descriptor) for rank in range(2)]
        exchanges = list(ranks.map(lambda place: ColumnExchange(place, torch.device("cpu")), places))
    others = [os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT) for _ in range(64)]

    for each in exchanges:
        each.abort()
        each.close()
        each.close()
    assert (tmp_path / "other").read_bytes() == b""
    for each in others:
        os.close(each)
    assert len(os.listdir("/proc/self/fd")) == before


def test_nccl_is_given_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for CPUs lacks it: this is a class that is called as torch's is."""
    made: list[tuple[Any, ...]] = []

    class Nccl:
        class Options:
            def __init__(self, is_high_priority_stream: bool = False) -> None:
                self._timeout = timedelta(minutes=10)

        def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
            made.append((type(store).__name__, rank, size, options._timeout))

    monkeypatch.setattr(column_exchange.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    with SharedMemory.create("meeting") as meeting:
        ColumnExchange(place_of(1, 2, meeting.descriptor), torch.device("cuda", 1))
    assert made == [("FileStore", 1, 2, timedelta(seconds=80))]
