"""Blocks that are written, copied, packed and named by their content."""

import pytest
import torch
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
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 12))
def test_keys_and_values_go_to_their_slots_and_nowhere_else(either, seed, count):
    torch.manual_seed(seed)
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    kv = torch.randn(4, 2, 2, 8, 24).to(dtypes[seed % 3])
    keys, values = torch.randn(2, count, 5, 24)[:, :, 1:3].to(dtypes[seed // 3 % 3])
    slots = torch.randperm(32)[:count]
    slots[torch.rand(count) < 0.3] = -1
    expected = kv.clone()
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // 8, :, 0, slot % 8] = keys[i].to(kv.dtype)
            expected[slot // 8, :, 1, slot % 8] = values[i].to(kv.dtype)
    either.cache_write(kv, keys, values, slots)
    assert torch.equal(kv, expected)


def test_layouts_convert_into_each_other(either):
    hnd = torch.randn(5, 3, 2, 8, 24)
    nhd = torch.zeros(5, 2, 8, 3, 24)
    either.convert_layout(nhd.permute(0, 3, 1, 2, 4), hnd)
    assert torch.equal(nhd, hnd.permute(0, 2, 3, 1, 4))
    back = torch.zeros_like(hnd)
    either.convert_layout(back, nhd.permute(0, 3, 1, 2, 4))
    assert torch.equal(back, hnd)
