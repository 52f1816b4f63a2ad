"""Caches and arenas with more elements than 32 bits can count. Memory that is never touched takes none."""

import functools
import mmap
from typing import Any

import _C_cuda_simt as native
import numpy as np
from arrays import F16, I32, I64, U8, Array, i32, ref
from attention_cases import make_plan

SIZE, DIM, HEADS = 16, 64, 2
SHAPE = HEADS, 2, SIZE, DIM  # of a block
BLOCKS = 2**31 // (HEADS * 2 * SIZE * DIM) + 5
NEAR = 5  # blocks of a cache that has the same in them, side by side


@functools.cache
def far_arena() -> np.ndarray:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = np.frombuffer(mmap.mmap(-1, 2 * BLOCKS * int(np.prod(SHAPE)), flags=flags), dtype=np.float16)
    return memory.reshape(BLOCKS, *SHAPE)


def handle(arena: np.ndarray) -> Any:
    return native.KvCache(ref(arena[:, :, 0], F16), ref(arena[:, :, 1], F16), "auto")


def far_case(rng: Any) -> None:
    """The last blocks of a large cache, and the same beside each other in a small one, give the same bits."""
    far, near = far_arena(), rng.normal(0, 1, (NEAR, *SHAPE)).astype(np.float16)
    ids = BLOCKS - 1 - rng.permutation(NEAR)
    far[ids] = near
    far[: 2 * NEAR] = 7.0  # where an offset that was cut short would lead
    written(rng, far, near, ids)
    attended(rng, far, near, ids)
    moved(rng, far, near, ids)
    assert (far[: 2 * NEAR] == 7.0).all()


def written(rng: Any, far: np.ndarray, near: np.ndarray, ids: np.ndarray) -> None:
    keys, values = (Array.of(rng.normal(0, 1, (4, HEADS, DIM)), F16) for _ in range(2))
    blocks, places = rng.permutation(NEAR)[:4], rng.integers(0, SIZE, 4)
    for arena, chosen in ((far, ids[blocks]), (near, blocks)):
        slots = (chosen * SIZE + places).astype(np.int64)
        native.cache_write(handle(arena), keys.ref, values.ref, ref(slots, I64), 0)
    assert (far[ids] == near).all(), "cache_write"


def attended(rng: Any, far: np.ndarray, near: np.ndarray, ids: np.ndarray) -> None:
    length = int(rng.integers(3, NEAR * SIZE))
    queries = Array.of(rng.normal(0, 1, (3, 2 * HEADS, DIM)), F16)
    for kernel, q_len in (("decode_mma", 1), ("prefill_mma", 3), ("simt", 2)):
        rows, _ = native.attention_kernel(kernel, F16, "auto", DIM, q_len * 2)
        packed = native.plan_attention([q_len], [length], HEADS, 2, rows, 3)
        results = []
        for arena, table in ((far, ids), (near, np.arange(NEAR))):
            plan, _kept = make_plan(packed, rows * (DIM + 2))
            out = Array.of(np.full((q_len, 2 * HEADS, DIM), np.nan), F16)
            numbers = [i32(table)[None], i32([0, q_len]), i32([length])]
            native.paged_attention(
                *(kernel, rows, out.ref, ref(queries.data[:q_len], F16), handle(arena)),
                *(*(ref(n, I32) for n in numbers), plan, native.Attention(0.125), 0),
            )
            results.append(out.data)
        assert np.isfinite(results[0]).all() and (results[0] == results[1]).all(), kernel


def moved(rng: Any, far: np.ndarray, near: np.ndarray, ids: np.ndarray) -> None:
    arena, block = ref(far[None], F16), ids.astype(np.int64)
    staging = np.zeros((NEAR, 1, 2 * int(np.prod(SHAPE))), dtype=np.uint8)
    native.gather_blocks(ref(staging, U8), arena, ref(block, I64), 0, 0)
    assert staging.tobytes() == near.tobytes(), "gather_blocks"
    sums = [np.zeros(NEAR, dtype=np.int64) for _ in range(2)]
    native.checksum_blocks(ref(sums[0], I64), arena, ref(block, I64), 0)
    native.checksum_blocks(ref(sums[1], I64), ref(near[None], F16), ref(np.arange(NEAR), I64), 0)
    assert (sums[0] == sums[1]).all(), "checksum_blocks"
    turned = staging[::-1].copy()
    native.scatter_blocks(arena, ref(turned, U8), ref(block, I64), 0, 0)
    assert (far[ids[::-1]] == near).all(), "scatter_blocks"
    pairs = np.stack((ids[:2], ids[3:]), 1).astype(np.int64)
    native.copy_blocks(arena, arena, ref(pairs, I64), 0)
    assert (far[ids[3:]] == far[ids[:2]]).all(), "copy_blocks"
    swapper = native.Swapper()
    swapper.wait(swapper.start(arena, ref(near[None], F16), [(int(ids[0]), 0), (int(ids[2]), 1)], 0, 1 << 16))
    assert (near[:2] == far[ids[[0, 2]]]).all(), "swap"
