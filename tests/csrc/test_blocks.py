"""Blocks that are written, copied, packed and named by their content."""

import random

import pytest
import torch
from caches import BYTES, KINDS, LAYOUTS, Cache, to_eight_bits
from checksums import checksum
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

fuzz = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
BLOCKS = 9


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@fuzz
@given(st.lists(st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1)), unique_by=lambda p: p[1]))
def test_copies_read_before_they_write(either, pairs):
    arena = torch.randn(3, BLOCKS, 2, 2, 8, 4)
    before = arena.clone()
    either.copy_blocks(arena, arena, torch.tensor(pairs, dtype=torch.int64).view(-1, 2))
    for source, target in pairs:
        assert torch.equal(arena[:, target], before[:, source])
    kept = [i for i in range(BLOCKS) if i not in {target for _, target in pairs}]
    assert torch.equal(arena[:, kept], before[:, kept])


@pytest.mark.parametrize("block_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_gathered_blocks_scatter_elsewhere(either, dtype, block_major):
    shape = (BLOCKS, 3, 2, 2, 8, 4) if block_major else (3, BLOCKS, 2, 2, 8, 4)
    arena = (torch.randn(shape) * 50).to(dtype)
    arena = arena.transpose(0, 1) if block_major else arena
    packed = torch.empty((2, 3, 2, 2, 8, 4), dtype=dtype)
    either.gather_blocks(packed, arena, ids(7, 2))
    assert torch.equal(packed, arena[:, [7, 2]].transpose(0, 1))
    other = torch.zeros((3, 5, 2, 2, 8, 4), dtype=dtype)
    either.scatter_blocks(other, packed, ids(0, 4))
    assert torch.equal(other[:, [0, 4]], arena[:, [7, 2]]) and not other[:, 1:4].any()


def test_parts_of_blocks_are_gathered_and_scattered(either):
    arena = torch.randint(0, 256, (2, BLOCKS, 40), dtype=torch.uint8)
    before, staging = arena.clone(), torch.empty(3, 2, 7, dtype=torch.uint8)
    either.gather_blocks(staging, arena, ids(8, 0, 4), 11)
    assert torch.equal(staging, arena[:, [8, 0, 4], 11:18].transpose(0, 1))
    either.scatter_blocks(arena, staging, ids(1, 2, 3), 33)
    before[:, [1, 2, 3], 33:] = staging.transpose(0, 1)
    assert torch.equal(arena, before)


def test_checksums_are_of_content(either):
    arena = torch.randn(3, BLOCKS, 2, 2, 8, 4)
    arena[:, 5] = arena[:, 1]
    arena[2, 6] = arena[2, 1]

    def sums(*which: int) -> list[int]:
        out = torch.empty(len(which), dtype=torch.int64)
        either.checksum_blocks(out, arena, ids(*which))
        return out.tolist()

    first = sums(*range(BLOCKS))
    assert len(set(first)) == BLOCKS - 1 and first[1] == first[5]
    arena.view(torch.int32)[1, 1, 1, 1, 7, 3] ^= 1  # one bit
    assert sums(1) != first[1:2] and sums(5, 0) == [first[5], first[0]]


@fuzz
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 40), block_major=st.booleans())
def test_checksums_are_those_of_every_device(either, seed, size, block_major):
    arena = torch.randint(0, 256, (4, 3, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    arena = arena.transpose(0, 1) if block_major else arena
    sums = torch.empty(arena.shape[1], dtype=torch.int64)
    either.checksum_blocks(sums, arena, torch.arange(len(sums)))
    assert sums.tolist() == [checksum(block.numpy()) for block in arena.unbind(1)]


def a_cache(rng: random.Random, layout: str = "", kind: str = "") -> Cache:
    shape = (5, rng.choice([1, 2, 3]), rng.choice([8, 16]), rng.choice([16, 32, 80]))
    return Cache(rng, layout or rng.choice(LAYOUTS), kind or rng.choice(KINDS), *shape)


def assert_stored(given: Cache, expected: Cache) -> None:
    """To the bit; with scales, where a quotient may fall on either side of a tie, to a unit of the last place."""
    if given.scales is None and given.kind != "int8_paged":
        assert all(map(torch.equal, given.bytes(), expected.bytes()))
        return
    ours, theirs = given.read(), expected.read()
    unit = {"fp8_e4m3": 1 / 8, "fp8_e5m2": 1 / 4}.get(given.kind, 0.0)
    step = (
        given.slot_scales(0).float().nan_to_num().max() if given.kind == "int8_paged" else max(map(max, given.scales))
    )
    torch.testing.assert_close(ours, theirs, rtol=unit, atol=1.01 * float(step), equal_nan=True)
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    assert same.float().mean() > 0.99


@fuzz
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 12))
def test_keys_and_values_go_to_their_slots_and_nowhere_else(either, seed, count):
    torch.manual_seed(seed)
    rng = random.Random(seed)
    cache, dtype = a_cache(rng), rng.choice([torch.float32, torch.float16, torch.bfloat16])
    expected = cache.moved(torch.arange(5))
    heads, dim = cache.read().shape[1], cache.dim
    keys, values = (torch.randn(2, count, heads + 3, dim)[:, :, 1 : heads + 1] * 3).to(dtype)
    slots = torch.randperm(5 * cache.size)[:count]
    slots[torch.rand(count) < 0.3] = -1
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected.put(slot, keys[i], values[i])
    either.cache_write(cache.handle(either), keys, values, slots)
    assert_stored(cache, expected)


@fuzz
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 9))
def test_rotation_on_the_way_in(either, seed, count):
    """Queries turn in place, keys on their way; the same as turning first."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    cache, dtype = a_cache(rng), rng.choice([torch.float32, torch.float16, torch.bfloat16])
    expected = cache.moved(torch.arange(5))
    heads, dim, interleaved = cache.read().shape[1], cache.dim, rng.random() < 0.5
    half = rng.choice([dim // 2, dim // 4, 3])
    queries, keys, values = (torch.randn(count, n, dim).to(dtype) for n in (2 * heads, heads, heads))
    angles = torch.rand(20, half) * 6
    positions, slots = torch.randint(0, 20, (count,)), torch.randperm(5 * cache.size)[:count]
    slots[torch.rand(count) < 0.3] = -1

    def turned(x: torch.Tensor) -> torch.Tensor:
        x = x.double().clone()
        places = [2 * torch.arange(half) + i if interleaved else torch.arange(half) + i * half for i in (0, 1)]
        a, b = x[..., places[0]], x[..., places[1]]
        cos, sin = (f(angles.double())[positions, None] for f in (torch.cos, torch.sin))
        x[..., places[0]], x[..., places[1]] = a * cos - b * sin, b * cos + a * sin
        return x.float()

    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected.put(slot, turned(keys)[i], values[i])
    wanted, tables = turned(queries), (angles.cos(), angles.sin(), 2 * half)
    either.rope_cache_write(cache.handle(either), queries, keys, values, positions, *tables, slots, interleaved)
    rounding = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(queries.float(), wanted, rtol=rounding, atol=rounding)
    ours, theirs = cache.read(), expected.read()
    kept = {"fp8_e4m3": 0.13, "fp8_e5m2": 0.26, "bfloat16": 1e-2, "float16": 2e-3}.get(cache.kind, 1e-5)
    step = {"int8": 0.07, "int8_paged": 0.04}.get(
        cache.kind, 1e-5
    )  # of 8 bits, for a product that fell on another side
    torch.testing.assert_close(ours, theirs, rtol=kept, atol=step, equal_nan=True)


def filled(cache: Cache) -> Cache:
    blocks, heads, _, size, dim = cache.read().shape
    for slot in range(blocks * size):
        cache.put(slot, *(torch.randn(2, heads, dim) * 2))
    return cache


def check_conversion(either, target: Cache, source: Cache, chosen: torch.Tensor | None) -> None:
    values = source.read().float()
    blocks = range(len(values)) if chosen is None else chosen.tolist()
    expected = target.moved(torch.arange(len(values)))
    for block in blocks:
        for place in range(source.size):
            expected.put(block * source.size + place, values[block, :, 0, place], values[block, :, 1, place])
    before = source.bytes()
    either.convert_layout(target.handle(either), source.handle(either), chosen)
    assert_stored(target, expected)
    assert all(map(torch.equal, source.bytes(), before))


@fuzz
@given(seed=st.integers(0, 2**32 - 1))
def test_layouts_and_types_convert_into_each_other(either, seed):
    torch.manual_seed(seed)
    rng = random.Random(seed)
    source = filled(a_cache(rng))
    blocks, heads, _, size, dim = source.read().shape
    target = Cache(rng, rng.choice(LAYOUTS), rng.choice([source.kind, *KINDS]), blocks, heads, size, dim)
    check_conversion(either, target, source, rng.choice([None, ids(*rng.sample(range(blocks), 3))]))


@pytest.mark.parametrize("kinds", [*((kind, kind) for kind in KINDS), ("float32", "bfloat16"), ("fp8_e4m3", "float16")])
@pytest.mark.parametrize("source_layout", LAYOUTS)
@pytest.mark.parametrize("target_layout", LAYOUTS)
def test_every_layout_becomes_every_other(either, target_layout, source_layout, kinds):
    rng = random.Random(0)
    torch.manual_seed(0)
    source = filled(Cache(rng, source_layout, kinds[0], 3, 2, 8, 32))
    target = Cache(rng, target_layout, kinds[1], 3, 2, 8, 32)
    check_conversion(either, target, source, rng.choice([None, ids(2, 0)]))


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_eight_bits_of_all_numbers(kernels, kind, dtype):
    """Every byte is read as torch reads it, and every half as torch rounds it, but saturated."""
    stored = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    numbers = stored.view(BYTES[kind]).float()
    wide = torch.empty(256, dtype=dtype)
    kernels.convert_fp8(wide, stored, 0.5, kind)
    torch.testing.assert_close(wide, (numbers * 0.5).to(dtype), rtol=0, atol=0, equal_nan=True)
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).to(dtype)
    back = torch.empty(halves.shape, dtype=torch.uint8)
    kernels.convert_fp8(back, halves, 2.0, kind)
    expected = to_eight_bits(halves.float() * 0.5, kind)
    torch.testing.assert_close(back.view(BYTES[kind]).float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def test_a_key_that_is_broken_stays_broken(kernels):
    """NaN among numbers of 8 bits with a scale of their own, and infinity."""
    cache = Cache(random.Random(0), "hnd", "int8_paged", 1, 1, 8, 16)
    keys, values = torch.ones(2, 1, 16), torch.ones(2, 1, 16)
    keys[0, 0, 3], values[1, 0, 5] = float("nan"), float("inf")
    kernels.cache_write(cache.handle(kernels), keys, values, ids(0, 1))
    stored = cache.read()[0, 0]
    assert stored[0, 0].isnan().all() and not stored[1, 1].isfinite().any()
    for whole in (stored[1, 0], stored[0, 1]):
        torch.testing.assert_close(whole, torch.ones(16).double(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2", "int8", "int8_paged"])
def test_what_is_too_large_saturates(kernels, kind):
    """With a scale of its own as well, which ends where float16 does."""
    cache = Cache(random.Random(0), "hnd", kind, 1, 2, 8, 16)
    cache.scales = None
    expected = cache.moved(ids(0))
    for slot, large in enumerate((8.3e6, 8.4e6, 1e30, 3.4e38)):
        keys = torch.linspace(-1, 1, 16).mul(large).expand(1, 2, 16)
        kernels.cache_write(cache.handle(kernels), keys, keys, ids(slot))
        expected.put(slot, keys[0], keys[0])
    assert_stored(cache, expected)
    assert cache.read()[0, :, :, :4].isfinite().all()
