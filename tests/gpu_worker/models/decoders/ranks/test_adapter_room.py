"""Adapters come and go in one memory, and none lies where another one does."""

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.group.shared_memory import SharedMemory
from gpu_worker.models.decoders.ranks.adapter_room import AdapterRoom
from gpu_worker.ops import native
from gpu_worker.ops.lora import Lora
from octavo.request.errors import TooLarge

ROOM = 1 << 16
pytestmark = pytest.mark.skipif(native.load() is None, reason="no extension")


def kept(room, number, rank):
    """An adapter of one layer, and its matrices in the room."""
    a, b = torch.full((rank, 40), float(number)), torch.full((rank, 24), -float(number))
    there = []

    def make(here):
        there.extend((here(a), here(b)))
        one, two = (native.load().Weight(matrix, "f32", *matrix.shape) for matrix in there)
        return replace(lora, native=native.load().Lora(1.0, [{"out": (one, ((two, 0),))}]))

    lora = Lora(f"{number}", rank, 1.0, [], a.nbytes + b.nbytes)
    return room.keep(lora.num_bytes, 1, make), there


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60)), max_size=40))
def test_what_is_kept_stays_and_what_is_dropped_leaves_its_place(asked):
    room, alive = AdapterRoom(torch.zeros(ROOM, dtype=torch.uint8), native.load()), {}
    for number, (name, rank) in enumerate(asked, 1):
        alive.pop(name, None)
        try:
            alive[name] = kept(room, number, rank), number
        except TooLarge:
            assert sum(lora.num_bytes for (lora, _), _ in alive.values()) > ROOM // 4
        assert all(a.eq(put).all() and b.eq(-put).all() for (_, (a, b)), put in alive.values())
    alive.clear()
    lora, there = kept(room, 1, 240)  # which fills nearly all
    del lora, there
    with pytest.raises(TooLarge, match="--adapter-bytes"):
        kept(room, 1, 300)


def test_what_cannot_be_made_leaves_its_place():
    room, outside = AdapterRoom(torch.zeros(ROOM, dtype=torch.uint8), native.load()), torch.ones(2, 40)
    weight = native.load().Weight(outside, "f32", 2, 40)
    for stack in ({"out": (weight, ((weight, 0),))}, {}):
        lora = Lora("1", 2, 1.0, [], 0, native=native.load().Lora(1.0, [stack]))
        if stack:
            with pytest.raises(ValueError, match="lora: lies in other memory"):
                room.keep(ROOM - 4096, 1, lambda here, lora=lora: lora)
        else:
            assert room.keep(ROOM - 4096, 1, lambda here, lora=lora: lora) is lora


def test_the_memory_of_what_is_dropped_goes_back_to_the_system():
    with SharedMemory.create("adapters") as memory:
        room = AdapterRoom(memory.map(1 << 24), native.load())
        lora, there = kept(room, 1, 20_000)
        most = os.fstat(memory.descriptor).st_blocks
        del lora, there
        lora, there = kept(room, 2, 20)
        assert os.fstat(memory.descriptor).st_blocks < most / 100
        del lora, there
