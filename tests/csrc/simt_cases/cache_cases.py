"""Writing into caches, moving blocks, and 8-bit numbers."""

from typing import Any

import _C_cuda_simt as native
import numpy as np
from arrays import BF16, F16, F32, I8, I64, TOLERANCE, U8, Array, close, decoded, fp8_values, ref, to_fp8
from checksums import checksum
from kv import Cache
from rows_cases import rotated
from scoring import attention_setup

# From a number to the next: its size times the first, and at least the second.
STEPS = {
    "fp8_e4m3": (1 / 8, 2**-9),
    "fp8_e5m2": (1 / 4, 2**-16),
    "int8": (0, 1),
    F32: (1e-6, 2e-6),
    F16: (2**-10, 1e-6),
    BF16: (2**-7, 1e-6),
}


def stored_as(values: np.ndarray, cache: Cache, scale: Any) -> np.ndarray:
    scaled = values if scale is None else values.astype(np.float32) / scale.reshape(-1, 1)
    if cache.kind.startswith("fp8"):
        return to_fp8(scaled, cache.kind)
    if cache.kind == "int8":
        return np.clip(np.rint(scaled), -127, 127).astype(np.int8)
    return Array.of(scaled, cache.dtype).data


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    return np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(want).tobytes()


def write_case(rng: Any) -> None:
    dtype, kind, layout, _, size, kv_heads, _ = attention_setup(rng, "simt")
    dim = 64 if layout == "xpack" else int(rng.choice([33, 48, 64, 128]))
    cache = Cache(rng, layout, kind, dtype, (5, kv_heads, size, dim))
    tokens = int(rng.integers(1, 9))
    wide = rng.normal(0, 1, (2, tokens, kv_heads + 1, dim))
    given = [Array.of(side, dtype) for side in wide]
    keys, values = (Array(a.data[:, :kv_heads], dtype) for a in given)
    slots = rng.permutation(5 * size)[:tokens].astype(np.int64)
    slots[rng.random(tokens) < 0.2] = -1
    if tokens > 1:
        slots[0] = 5 * size + int(rng.integers(0, 100))  # past the end: skipped
    before = [cache.side(i).copy() for i in range(2)]
    rope = rng.random() < 0.5
    rotated_keys = keys.values()
    if rope:
        half, interleaved = int(rng.choice([4, 8, 16])), bool(rng.random() < 0.5)
        positions = rng.integers(0, 20, tokens).astype(np.int64)
        angles = rng.uniform(0, 6, (20, half))
        table = Array.of(np.concatenate((np.cos(angles), np.sin(angles)), 1), F32 if rng.random() < 0.5 else dtype)
        queries = Array.of(rng.normal(0, 1, (tokens, 3, dim)), dtype)
        want_queries = rotated(queries.values(), positions, table.values(), half, interleaved)
        rotated_keys = Array.of(rotated(keys.values(), positions, table.values(), half, interleaved), dtype).values()
        native.rope_cache_write(
            cache.handle(),
            queries.ref,
            keys.ref,
            values.ref,
            ref(positions, I64),
            *(Array(half_of, table.dtype).ref for half_of in (table.data[:, :half], table.data[:, half:])),
            2 * half,
            ref(slots, I64),
            interleaved,
            0,
        )
        close(queries.values(), want_queries, TOLERANCE[dtype], "rope queries")
    else:
        native.cache_write(cache.handle(), keys.ref, values.ref, ref(slots, I64), 0)
    what = f"write {rope=} {dtype=} {kind} {layout} {dim=} {size=} {slots=}"
    told = native.take_fault()
    assert told == ("slot_mapping: named a slot past the last block" if tokens > 1 else None), told
    for index, numbers in enumerate((rotated_keys, values.values())):
        got, want = cache.side(index).copy(), before[index]
        for token, slot in enumerate(slots):
            if 0 <= slot < 5 * size:
                block, place = divmod(slot, size)
                scale = (cache.key_scale, cache.value_scale)[index]
                want[block, :, place] = stored_as(numbers[token], cache, scale)
                if rope and index == 0:
                    assert_within_a_step(got[block, :, place], want[block, :, place], cache, what)
                    got[block, :, place] = want[block, :, place]
        assert same_bits(got, want), what


def assert_within_a_step(got: np.ndarray, want: np.ndarray, cache: Cache, what: str) -> None:
    """Rotated in float32 and rounded, a number may become the one beside it."""
    relative, least = STEPS[cache.kind if cache.kind != "auto" else cache.dtype]
    numbers, wanted = (decoded(x, cache.dtype, cache.kind) for x in (got, want))
    assert (np.abs(numbers - wanted) <= relative * np.abs(wanted) + least).all(), what


def blocks_case(rng: Any) -> None:
    dtype = int(rng.choice([U8, F16, F32]))
    layers, blocks = int(rng.integers(1, 4)), 9
    tail = tuple(int(n) for n in rng.choice([1, 2, 8, 12], 3))
    arena = Array.of(rng.integers(0, 200, (layers, blocks, *tail)), dtype).data
    other = Array.of(rng.integers(0, 200, (layers, blocks, *tail)), dtype).data
    ids = rng.permutation(blocks)
    pairs = np.stack((ids[:3], ids[3:6]), 1).astype(np.int64)
    want = arena.copy()
    want[:, pairs[:, 1]] = arena[:, pairs[:, 0]]
    native.copy_blocks(ref(arena, dtype), ref(arena, dtype), ref(pairs, I64), 0)
    assert (arena == want).all(), "copy_blocks"
    want = other.copy()
    want[:, pairs[:, 1]] = arena[:, pairs[:, 0]]
    swapper = native.Swapper()
    swapper.wait(swapper.start(ref(arena, dtype), ref(other, dtype), pairs.tolist(), 0, 1 << 16))
    assert (other == want).all(), "swap"
    length = int(np.prod(tail)) * arena.itemsize
    begin = int(rng.integers(0, length))
    staging = np.full((4, layers, int(rng.integers(1, length - begin + 1))), 255, dtype=np.uint8)
    chosen = ids[:4].astype(np.int64)
    native.gather_blocks(ref(staging, U8), ref(arena, dtype), ref(chosen, I64), begin, 0)
    raw = arena.reshape(layers, blocks, -1).view(np.uint8)
    end = begin + staging.shape[2]
    assert (staging == raw[:, chosen, begin:end].swapaxes(0, 1)).all(), "gather_blocks"
    targets = ids[5:9].astype(np.int64)
    want = other.reshape(layers, blocks, -1).view(np.uint8).copy()
    want[:, targets, begin:end] = staging.swapaxes(0, 1)
    native.scatter_blocks(ref(other, dtype), ref(staging, U8), ref(targets, I64), begin, 0)
    assert (other.reshape(layers, blocks, -1).view(np.uint8) == want).all(), "scatter_blocks"
    sums = np.zeros(4, dtype=np.int64)
    inner = arena[:, :, int(rng.integers(tail[0])) :]  # begins, and ends, anywhere
    native.checksum_blocks(ref(sums, I64), ref(inner, dtype), ref(chosen, I64), 0)
    inner_bytes = np.ascontiguousarray(inner).reshape(layers, blocks, -1).view(np.uint8)
    assert sums.tolist() == [checksum(inner_bytes[:, block]) for block in chosen], "checksum_blocks"


def convert_case(rng: Any) -> None:
    dtype, kind = int(rng.choice([F32, F16, BF16])), str(rng.choice(["fp8_e4m3", "fp8_e5m2", "int8"]))
    count = int(rng.integers(1, 3000))
    spread = 10.0 ** rng.uniform(-4, 4, count)
    wide = Array.of(
        rng.normal(0, 1, count) * spread if dtype != F16 else np.clip(rng.normal(0, 1, count) * spread, -6e4, 6e4),
        dtype,
    )
    narrow = np.zeros(count, dtype=np.uint8)
    native.convert_fp8(ref(narrow, U8), wide.ref, 0.5, kind, 0)
    if kind == "int8":
        assert (narrow.view(np.int8) == np.clip(np.rint(wide.values() * 2), -127, 127)).all(), f"convert_fp8 {dtype}"
        back = Array.of(np.zeros(count), dtype)
        native.convert_fp8(back.ref, ref(narrow.view(np.int8), I8), 0.5, kind, 0)
        assert (back.values() == narrow.view(np.int8) * 0.5).all(), f"convert_fp8 back {dtype}"
        return
    assert (narrow == to_fp8(wide.values() * 2, kind)).all(), f"convert_fp8 {kind} {dtype}"
    codes = rng.integers(0, 256, count).astype(np.uint8)
    codes = codes[np.isfinite(fp8_values(kind)[codes])]
    back = Array.of(np.zeros(len(codes)), dtype)
    if len(codes):
        native.convert_fp8(back.ref, ref(codes, U8), 0.5, kind, 0)
        assert (back.values() == Array.of(fp8_values(kind)[codes] * 0.5, dtype).values()).all(), (
            f"convert_fp8 back {kind} {dtype}"
        )
