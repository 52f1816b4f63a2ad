"""Swapping blocks, over a CUDA runtime whose streams make progress by chance and whose calls fail when told to."""

from typing import Any

import _C_cuda_simt as native
import numpy as np
from argument_cases import refusal
from arrays import F32, I32, ref

ALWAYS_ENGINE, ALWAYS_KERNEL = 0, 1 << 40


class Arenas:
    """Two arenas [layers, blocks, ...], of which blocks may have gaps between them.

    One of them may be a staging area, in which the layers of a block follow each other.
    """

    def __init__(self, rng: Any) -> None:
        layers, self.blocks = int(rng.integers(1, 4)), 24
        self.tail = 2, int(rng.choice([3, 8]))
        self.dense = bool(rng.random() < 0.7)
        self.sides = []
        staged = rng.permutation(["neither", "source", "target"])[0]
        for name in ("source", "target"):
            shape = (layers, self.blocks) if staged != name else (self.blocks, layers)
            shape = *shape, self.tail[0] + (not self.dense), self.tail[1]
            side = rng.normal(0, 1, shape).astype(np.float32)[:, :, : self.tail[0]]
            self.sides.append(side if staged != name else side.swapaxes(0, 1))
        self.dense = self.dense and (staged == "neither" or layers == 1)

    def refs(self) -> list[Any]:
        return [ref(side, F32) for side in self.sides]

    def pairs(self, rng: Any) -> list[tuple[int, int]]:
        """Runs of neighbours, and loners, in any order."""
        sources, targets = rng.permutation(self.blocks), rng.permutation(self.blocks)
        run = int(rng.integers(1, self.blocks // 2))
        first, second = (int(n) for n in rng.integers(0, self.blocks - run, 2))
        if rng.random() < 0.6:
            found = [(first + i, second + i) for i in range(run)]
        else:
            found = [(int(a), int(b)) for a, b in zip(sources[:run], targets[:run], strict=True)]
        return [found[i] for i in rng.permutation(len(found))]


def moved(arenas: Arenas, pairs: list[tuple[int, int]]) -> np.ndarray:
    want = arenas.sides[1].copy()
    for source, target in pairs:
        want[:, target] = arenas.sides[0][:, source]
    return want


def num_copies(arenas: Arenas, pairs: list[tuple[int, int]]) -> int:
    """The fewest copies that move these blocks."""
    known = set(pairs)
    starts = [pair for pair in pairs if not arenas.dense or (pair[0] - 1, pair[1] - 1) not in known]
    return len(starts) * len(arenas.sides[0])


def swap_case(rng: Any) -> None:
    copied_case(rng)
    ring_case(rng)
    failing_case(rng)
    refused_swaps(rng)


def copied_case(rng: Any) -> None:
    """The copies are there once the ticket is done. They are as few as possible, and made by engines or a kernel."""
    arenas = Arenas(rng)
    swapper = native.Swapper()
    lived = native.runtime.live()
    tickets, want = [], arenas.sides[1]
    for _ in range(int(rng.integers(1, 5))):
        pairs = arenas.pairs(rng)
        want = moved(arenas, pairs)
        small = int(rng.choice([ALWAYS_ENGINE, ALWAYS_KERNEL]))
        native.runtime.take_calls()
        tickets.append(swapper.start(*arenas.refs(), pairs, 0, small))
        calls, copies = native.runtime.take_calls(), num_copies(arenas, pairs)
        assert calls == ("erwkr" if small and copies >= 16 else f"erwb{copies}r"), (calls, copies, pairs)
        swapper.wait(tickets[-1]) if rng.random() < 0.5 else until_done(swapper, tickets[-1])
        assert (arenas.sides[1] == want).all()
        assert all(swapper.done(ticket) for ticket in tickets)
        assert native.runtime.live() == lived, "a swap that is done keeps something"
    again = swapper.start(*arenas.refs(), [(0, 1)], 0, 0)
    swapper.let_wait(again, 0)  # the null stream: nothing goes on before the copy is there
    assert (arenas.sides[1][:, 1] == arenas.sides[0][:, 0]).all()
    assert tickets == list(range(len(tickets))) and again == len(tickets)
    unasked = [swapper.start(*arenas.refs(), [(2, 3)], 0, 0) for _ in range(40)]
    swapper.wait(unasked[-1])
    swapper.start(*arenas.refs(), [(2, 3)], 0, 0)
    assert native.runtime.live() <= lived + 2, "tickets whose callers never ask pile up"
    del swapper


def ring_case(rng: Any) -> None:
    """Pairs have places in a ring: those of swaps that go on are not overwritten, and where there is no room, the copy
    engines copy."""
    arenas = Arenas(rng)
    layers = len(arenas.sides[0])
    count = 16 // layers + 1
    swapper = native.Swapper(3 * count)
    tickets, kinds, want = [], "", arenas.sides[1]
    for _ in range(40):
        chosen = rng.permutation(arenas.blocks)[:count]
        pairs = [(int(a), int(b)) for a, b in zip(rng.permutation(arenas.blocks)[:count], chosen, strict=True)]
        copies = num_copies(arenas, pairs)
        native.runtime.take_calls()
        tickets.append(swapper.start(*arenas.refs(), pairs, 0, ALWAYS_KERNEL))
        calls = native.runtime.take_calls()
        kinds += "k" if "k" in calls else "b" if copies >= 16 else "-"
        before, arenas.sides[1] = arenas.sides[1], want
        want, arenas.sides[1] = moved(arenas, pairs), before
        if rng.random() < 0.3:
            swapper.wait(tickets[int(rng.integers(len(tickets)))])
    swapper.wait(tickets[-1])
    assert (arenas.sides[1] == want).all()
    assert "k" in kinds and native.runtime.last_error() == 0, kinds
    large = native.Swapper(1)
    native.runtime.take_calls()
    large.wait(large.start(*arenas.refs(), pairs, 0, ALWAYS_KERNEL))
    assert "k" not in native.runtime.take_calls(), "more pairs than the ring has"


def until_done(swapper: Any, ticket: int) -> None:
    for _ in range(10000):
        if swapper.done(ticket):
            return
    raise AssertionError("never done")


def failing_case(rng: Any) -> None:
    """Whichever call fails: it is told, nothing is kept, and the swapper goes on."""
    arenas = Arenas(rng)
    swapper = native.Swapper()
    lived = native.runtime.live()
    pairs = [(i, (i * 5 + 1) % arenas.blocks) for i in range(18)]
    small = int(rng.choice([ALWAYS_ENGINE, ALWAYS_KERNEL]))
    failures, told = 0, ""
    for call in range(8):
        native.runtime.fail_after(call)
        try:
            ticket = swapper.start(*arenas.refs(), pairs, 0, small)
        except RuntimeError as error:
            told = str(error)
            assert native.runtime.live() == lived, (call, small)
            assert native.runtime.last_error() == 0, "whoever asks next finds our error"
            failures += 1
            continue
        finally:
            native.runtime.fail_after(-1)
        swapper.wait(ticket)
    assert failures == 5, failures  # event, record, wait, kernel or batch, record
    assert told == "swap: out of memory"
    want = moved(arenas, pairs)
    swapper.wait(swapper.start(*arenas.refs(), pairs, 0, small))
    assert (arenas.sides[1] == want).all()


def refused_swaps(rng: Any) -> None:
    arenas = Arenas(rng)
    source, target = arenas.refs()
    swapper = native.Swapper()
    before = [side.copy() for side in arenas.sides]
    for pairs in ([(-1, 0)], [(0, 24)], [(24, 0)], [(0, 3), (1, 3)]):
        message = refusal(lambda pairs=pairs: swapper.start(source, target, pairs, 0, 0))
        assert message.startswith("pairs: "), message
    message = refusal(lambda: swapper.start(source, source, [(0, 1), (1, 2)], 0, 0))
    assert message.startswith("pairs: read and write"), message
    other = ref(arenas.sides[1][:, :, :1], F32)
    assert refusal(lambda: swapper.start(source, other, [(0, 1)], 0, 0)).startswith("target: ")
    gaps = ref(arenas.sides[0][:, :, :, ::2], F32)
    assert refusal(lambda: swapper.start(gaps, target, [(0, 1)], 0, 0)).startswith("source: ")
    for ticket in (-1, 0, 7):
        assert refusal(lambda ticket=ticket: swapper.done(ticket)).startswith("ticket: ")
    assert all((side == old).all() for side, old in zip(arenas.sides, before, strict=True))


def device_case(rng: Any) -> None:
    """What is too old is named: the device, the driver, or the driver for a device that came after this build, which
    has machine code for 8.0 and 9.0a, and PTX for 8.0."""
    cuda = 13000
    for capability, driver, expected in (
        ((7, 5), cuda, "device 0 has compute capability 7.5, which is too old: the kernels were built for 80,90a-real"),
        ((8, 0), cuda, ""),
        ((8, 0), 12080, ""),  # machine code runs with an older driver of CUDA 13, of which the runtime itself decides
        ((8, 9), 12080, ""),
        ((9, 0), 12080, ""),
        ((10, 0), cuda, ""),
        ((12, 0), cuda + 10, ""),
        (
            (10, 0),
            12080,
            "device 0 has compute capability 10.0, for which the driver has to compile them, but the driver "
            "is for CUDA 12.8, older than the 13.0 that the kernels were built with",
        ),
    ):
        native.runtime.choose_versions(*capability, driver, 1)
        assert native.unsupported(0) == expected, (capability, driver, native.unsupported(0))
        # Elsewhere code for 8.0 runs, as it is or made from its PTX.
        assert native.multiplies_fp8(0) == (capability == (9, 0)), capability
    native.runtime.choose_versions(9, 0, 11040, 0)  # the runtime finds no devices, because of the driver
    assert native.unsupported(0).startswith("the driver is for CUDA 11.4, older than the 13.0"), native.unsupported(0)
    assert native.device_count() == 0
    native.runtime.choose_versions(9, 0, 0, 0)
    assert native.unsupported(0) == "" and native.device_count() == 0  # no driver at all
    assert native.runtime.last_error() == 0
    native.runtime.choose_versions(9, 0, cuda, 1)


def place_case(rng: Any) -> None:
    """Memory that the device cannot use is refused by the argument's name, before anything is read."""
    x, weight, out, table = np.ones((2, 16)), np.ones(16), np.zeros((2, 16)), np.zeros((2, 3))
    host, elsewhere = (np.ones((2, 16), dtype=np.float32) for _ in range(2))
    native.runtime.place_memory(host.ctypes.data, host.nbytes, 0, 0)
    native.runtime.place_memory(elsewhere.ctypes.data, elsewhere.nbytes, 2, 7)
    arrays = [a.astype(np.float32) for a in (out, x, weight)]
    good = [ref(a, F32) for a in arrays]
    names = "out", "x", "weight"
    for i, name in enumerate(names):
        for wrong, why in ((host, "host's memory"), (elsewhere, "another CUDA device")):
            array = wrong[0] if name == "weight" else wrong
            given = [ref(array, F32) if j == i else good[j] for j in range(3)]
            message = refusal(lambda given=given: native.rms_norm(*given, 1e-5, 0))
            assert message.startswith(f"{name}: ") and why in message, message
    swapper = native.Swapper()
    arena = np.zeros((1, 2, 4, 4), dtype=np.float32)
    message = refusal(lambda: swapper.start(ref(host.reshape(1, 2, 4, 4), F32), ref(arena, F32), [(0, 1)], 0, 0))
    assert message.startswith("source: "), message
    tables = table.astype(np.int32)
    native.runtime.place_memory(tables.ctypes.data, tables.nbytes, 0, 0)
    message = refusal(lambda: native.copy_blocks(ref(arena, F32), ref(arena, F32), ref(tables, I32), 0))
    assert message.startswith("pairs: "), message
    for memory in (host, elsewhere, tables):  # others may get these addresses
        native.runtime.place_memory(memory.ctypes.data, memory.nbytes, 3, 0)
