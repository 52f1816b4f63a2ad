"""What paged attention promises beside being right: bits that depend on nothing else, NaN that is not lost, and
numbers on the device that are not believed."""

from typing import Any

import _C_cuda_simt as native
import numpy as np
from arrays import BF16, F16, F32, TOLERANCE, close
from attention_cases import Step
from scoring import Scoring, attention_setup

KERNELS = {"decode_mma": "mma", "prefill_mma": "mma", "simt": "simt"}


def any_step(rng: Any, sequences: int, plain: bool = False) -> tuple[str, Step]:
    """A kernel, and a step of short sequences for it."""
    kernel = str(rng.choice(list(KERNELS)))
    setup = attention_setup(rng, KERNELS[kernel])
    size, group = setup[4], setup[6]
    longest = max(1, 16 // group) if kernel == "decode_mma" else 9
    q_lens = [int(rng.integers(1, longest + 1)) for _ in range(sequences)]
    lens = [q + int(rng.choice([0, 1, size, 70])) for q in q_lens]
    return kernel, Step(rng, setup, q_lens, lens, Scoring(rng, setup[5] * group, setup[5], plain))


def same_bits_case(rng: Any) -> None:
    """Wherever blocks lie, and (for fixed pieces) whatever else is in the batch, results have the same bits."""
    kernel, step = any_step(rng, 3)
    slots, fixed = int(rng.integers(1, 9)), int(rng.choice([64, 48]))
    first = step.run(kernel, slots, fixed)
    blocks = step.cache.shape[0]
    order = rng.permutation(blocks)
    for side in (*step.cache.refs, *step.cache.slot_scales):
        moved = side.copy()
        moved[order] = side
        side[...] = moved
    known = step.tables < blocks
    step.tables[known] = order[step.tables[known]]
    second = step.run(kernel, slots, fixed)
    assert (first.data == second.data).all(), f"{kernel} {step.what}"
    alone = int(rng.integers(3))
    rows = step.rows_of(alone)
    step.queries.data = step.queries.data[rows]
    step.tables = step.tables[alone : alone + 1]
    step.q_lens, step.lens = [step.q_lens[alone]], [step.lens[alone]]
    step.cu_q = step.cu_q[[0, 0]] + np.array([0, step.q_lens[0]], dtype=np.int32)
    third = step.run(kernel, int(rng.integers(1, 9)), fixed)
    assert (third.data == first.data[rows]).all(), f"{kernel} {step.what}"


def not_a_number(step: Step) -> list[int]:
    """The stored codes of NaN in a cache of this kind."""
    return {
        "fp8_e4m3": [0x7F, 0xFF],
        "fp8_e5m2": [0x7D, 0x7E, 0x7F, 0xFD],
        "auto": {F16: [0x7E00, 0xFE01], BF16: [0x7FC0, 0xFFC1], F32: [0x7FC00000]}[step.dtype],
    }[step.kind]


def nan_case(rng: Any) -> None:
    """A NaN in a key or a value, or its scale, shows in all rows that see it, and in no other sequence's."""
    kernel, step = any_step(rng, 2)
    while step.kind == "int8" and not step.cache.slot_scales:  # which has none
        kernel, step = any_step(rng, 2)
    side, sequence, head = int(rng.integers(2)), int(rng.integers(2)), int(rng.integers(step.kv_heads))
    key = (
        step.lens[sequence] - step.q_lens[sequence] - int(rng.integers(3))
    )  # what all of its queries see, or the first
    if key < 0:
        return
    size, dim = step.cache.shape[2:]
    block, slot, d = int(step.tables[sequence, key // size]), key % size, int(rng.integers(dim))
    if block >= step.cache.shape[0]:
        return
    scaled = bool(step.cache.slot_scales)
    if scaled:
        step.cache.slot_scales[side][block, head, slot] = np.nan
    code = 1 if scaled else int(rng.choice(not_a_number(step)))
    places = step.cache.refs[side].view(f"u{step.cache.refs[side].itemsize}")
    if step.cache.layout == "xpack":
        x = step.cache.refs[0].shape[4]
        places[(block, head, d // x, slot, d % x) if side == 0 else (block, head, d, slot)] = code
    else:
        places[block, head, slot, d] = code
    out = step.run(kernel, int(rng.integers(1, 9)))
    what = f"{kernel} {step.what} {side=} {code=:#x} {key=}"
    rows, heads = step.rows_of(sequence), slice(head * step.group, (head + 1) * step.group)
    got = out.values()
    for j, row in enumerate(range(rows.start, rows.stop)):
        for one in range(heads.start, heads.stop):
            position = step.lens[sequence] - step.q_lens[sequence] + j
            if step.scoring.seen(one, position)[key]:
                seen = got[row, one] if side == 0 or scaled else got[row, one, d]
                assert np.isnan(seen).all(), what
    other = 1 - sequence
    close(got[step.rows_of(other)], step.want([other])[step.rows_of(other)], TOLERANCE[step.dtype], what)


def lost_case(rng: Any) -> None:
    """A block that is not there is not followed; the host hears of it, and other sequences have their results."""
    kernel, step = any_step(rng, 2, plain=True)
    size = step.cache.shape[2]
    sequence = int(rng.integers(2))
    place = int(rng.integers(-(-step.lens[sequence] // size)))
    step.tables[sequence, place] = int(rng.choice([-1, -(2**31), step.cache.shape[0], 2**31 - 1, 1 << 20]))
    out = step.run(kernel, int(rng.integers(1, 9)))
    what = f"{kernel} {step.what} {place=} of {sequence}"
    assert native.take_fault() == "block_tables: named a block that is not there", what
    other = step.rows_of(1 - sequence)
    close(out.values()[other], step.want([1 - sequence])[other], TOLERANCE[step.dtype], what)
