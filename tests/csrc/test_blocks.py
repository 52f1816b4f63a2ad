"""Blocks: written to, copied, gathered, scattered and named by their content."""

import random

import pytest
import torch
from caches import BYTES, KINDS, LAYOUTS, Cache, to_eight_bits
from checksums import checksum
from effort import draws
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

fuzz = settings(max_examples=draws(8, 25), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
seeds = st.integers(0, 2**32 - 1)
BLOCKS = 9
FLOATS = torch.float32, torch.float16, torch.bfloat16
EIGHT_BITS = pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2", "int8"])


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@fuzz
@given(st.lists(st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1)), unique_by=lambda p: p[1]))
def test_copies_read_before_they_write(either, pairs):
    arena = torch.randn(3, BLOCKS, 2, 2, 8, 4)
    wanted = arena.clone()
    for source, target in pairs:
        wanted[:, target] = arena[:, source]
    either.copy_blocks(arena, arena, ids(*pairs).view(-1, 2))
    assert torch.equal(arena, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_gathered_blocks_scatter_elsewhere(either, dtype):
    """Whole, and in parts."""
    arena = (torch.randn(3, BLOCKS, 2, 2, 8, 4) * 50).to(dtype)
    packed = torch.empty((2, 3, 2, 2, 8, 4), dtype=dtype)
    either.gather_blocks(packed, arena, ids(7, 2))
    assert torch.equal(packed, arena[:, [7, 2]].transpose(0, 1))
    other = torch.zeros((3, 5, 2, 2, 8, 4), dtype=dtype)
    either.scatter_blocks(other, packed, ids(0, 4))
    assert torch.equal(other[:, [0, 4]], arena[:, [7, 2]]) and not other[:, 1:4].any()
    arena = torch.randint(0, 256, (2, BLOCKS, 40), dtype=torch.uint8)
    wanted, staging = arena.clone(), torch.empty(3, 2, 7, dtype=torch.uint8)
    either.gather_blocks(staging, arena, ids(8, 0, 4), 11)
    assert torch.equal(staging, arena[:, [8, 0, 4], 11:18].transpose(0, 1))
    either.scatter_blocks(arena, staging, ids(1, 2, 3), 33)
    wanted[:, [1, 2, 3], 33:] = staging.transpose(0, 1)
    assert torch.equal(arena, wanted)


@fuzz
@given(seed=seeds, size=st.integers(1, 40))
def test_checksums_are_those_of_every_device(either, seed, size):
    """And of content: equal blocks have equal ones, in any order, and one bit tells."""
    arena = torch.randint(0, 256, (4, 4, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    arena[:, 3] = arena[:, 1]

    def sums(*which: int) -> list[int]:
        out = torch.empty(len(which), dtype=torch.int64)
        either.checksum_blocks(out, arena, ids(*which))
        return out.tolist()

    first = sums(0, 1, 2, 3)
    assert first == [checksum(block.numpy()) for block in arena.unbind(1)] and first[1] == first[3]
    arena[seed % 4, 1, seed % size] ^= 1
    assert sums(1) != first[1:2] and sums(3, 0) == [first[3], first[0]]


def assert_stored(given: Cache, expected: Cache) -> None:
    """Equal to the bit, or, where each slot has a scale, to a unit of the last place: the scale may be rounded away."""
    if given.kind != "int8_paged":
        assert all(map(torch.equal, given.bytes(), expected.bytes()))
        return
    ours, theirs = given.read(), expected.read()
    step = float(given.slot_scales(0).float().nan_to_num().max())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1.01 * step, equal_nan=True)
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    assert same.float().mean() > 0.99


@fuzz
@given(seed=seeds, count=st.integers(0, 12))
def test_keys_and_values_go_to_their_slots_and_nowhere_else(either, seed, count):
    torch.manual_seed(seed)
    rng = random.Random(seed)
    heads, size, dim = rng.choice([1, 2, 3]), rng.choice([8, 16]), rng.choice([16, 32, 80])
    cache = Cache(rng, rng.choice(LAYOUTS), rng.choice(KINDS), 5, heads, size, dim)
    expected = cache.moved(torch.arange(5))
    keys, values = (torch.randn(2, count, heads + 3, dim)[:, :, 1 : heads + 1] * 3).to(rng.choice(FLOATS))
    slots = torch.randperm(5 * size)[:count]
    slots[torch.rand(count) < 0.3] = -1
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected.put(slot, keys[i], values[i])
    either.cache_write(cache.handle(either), keys, values, slots)
    assert_stored(cache, expected)


@EIGHT_BITS
def test_all_numbers_of_eight_bits_are_read_as_torch_reads_them(kernels, kind):
    """Attention to one key gives its value: 16 sequences of one token, each with 16 of the 256 bytes as its value."""
    for dtype in FLOATS:
        stored = torch.arange(256, dtype=torch.int16).to(torch.uint8)
        keys, values = torch.zeros(2, 16, 1, 8, 16, dtype=torch.uint8)
        values[:, 0, 0] = stored.view(16, 16)
        kv = kernels.KvCache(keys, values, kind, torch.ones(1), torch.tensor([0.5]))
        out, ends = torch.empty(16, 1, 16, dtype=dtype), torch.arange(17, dtype=torch.int32)
        lens, tables = torch.ones(16, dtype=torch.int32), ends[:16, None].clone()
        kernels.paged_attention(out, torch.zeros_like(out), kv, ends, lens, tables, 1.0)
        expected = (stored.view(BYTES[kind]).float() * 0.5).to(dtype)
        torch.testing.assert_close(out.flatten(), expected, rtol=0, atol=0, equal_nan=True)


def written(kernels, numbers: torch.Tensor, kind: str, scale: float) -> torch.Tensor:
    """The bytes that `numbers` [n], a multiple of 16, become in a cache with this scale."""
    rows = numbers.view(-1, 1, 16)
    keys, values = torch.empty(2, -(-len(rows) // 8), 1, 8, 16, dtype=torch.uint8)
    scales = torch.full((1,), scale)
    kernels.cache_write(kernels.KvCache(keys, values, kind, scales, scales), rows, rows, torch.arange(len(rows)))
    assert torch.equal(keys, values)
    return keys.flatten()[: len(numbers)].view(BYTES[kind])


@EIGHT_BITS
def test_all_halves_are_written_as_torch_rounds_them_but_saturated(kernels, kind):
    """The quotient is what is rounded: a product with 1 / scale falls on another side of halves, or is no number."""
    for dtype in FLOATS:
        halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).to(dtype)
        found, expected = written(kernels, halves, kind, 2.0).float(), to_eight_bits(halves.float() * 0.5, kind)
        torch.testing.assert_close(found, expected.float(), rtol=0, atol=0, equal_nan=True)
    for scale in (3.0, 0.7, 1e-39):
        halves = torch.arange(2**15 - 2**10, dtype=torch.int16).view(torch.float16).float()
        wide = torch.cat((halves, halves * scale))
        expected = to_eight_bits(wide / torch.tensor(scale), kind)
        assert torch.equal(written(kernels, wide, kind, scale).view(torch.uint8), expected.view(torch.uint8))


def test_a_key_that_is_broken_stays_broken(kernels):
    """NaN among numbers of 8 bits with a scale of their own, and infinity."""
    cache = Cache(random.Random(0), "hnd", "int8_paged", 1, 1, 8, 16)
    keys, values = torch.ones(2, 2, 1, 16)
    keys[0, 0, 3], values[1, 0, 5] = float("nan"), float("inf")
    kernels.cache_write(cache.handle(kernels), keys, values, ids(0, 1))
    stored = cache.read()[0, 0]
    assert stored[0, 0].isnan().all() and not stored[1, 1].isfinite().any()
    for whole in (stored[1, 0], stored[0, 1]):
        torch.testing.assert_close(whole, torch.ones(16).double(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", [*BYTES, "int8_paged"])
def test_what_is_too_large_saturates(kernels, kind):
    """Also with a scale for each slot, which ends where float16 does."""
    cache = Cache(random.Random(0), "hnd", kind, 1, 2, 8, 16)
    cache.scales = None
    expected = cache.moved(ids(0))
    for slot, large in enumerate((8.3e6, 8.4e6, 1e30, 3.4e38)):
        keys = torch.linspace(-1, 1, 16).mul(large).expand(1, 2, 16)
        kernels.cache_write(cache.handle(kernels), keys, keys, ids(slot))
        expected.put(slot, keys[0], keys[0])
    assert_stored(cache, expected)
    assert cache.read()[0, :, :, :4].isfinite().all()
