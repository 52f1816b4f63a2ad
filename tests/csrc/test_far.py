"""Offsets past 2^31 elements give the bits that near ones give. Memory that is never touched takes none.

Not for a build with sanitizers, which touches it.
"""

import mmap
from types import ModuleType

import torch
from torch import Tensor

SIZE, DIM, HEADS = 16, 64, 2
BLOCKS = 2**31 // (2 * HEADS * SIZE * DIM) + 5
NEAR = 5
LAST = BLOCKS - 1 - torch.tensor([3, 0, 4, 1, 2])


def memory() -> Tensor:
    """More than 2^31 numbers, all zero."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, 4 * (2**31 + 2**20), flags=flags), dtype=torch.float32)


def arena() -> Tensor:
    return memory()[: BLOCKS * 2 * HEADS * SIZE * DIM].view(BLOCKS, HEADS, 2, SIZE, DIM)


def test_keys_and_values_far_away(extension: ModuleType) -> None:
    torch.manual_seed(0)
    far = arena()
    near = torch.randn(NEAR, HEADS, 2, SIZE, DIM)
    far[LAST] = near
    far[: 2 * NEAR] = 7.0  # where an offset that was cut short would lead
    keys, values = torch.randn(2, 3, HEADS, DIM)
    queries = torch.randn(40, 2 * HEADS, DIM)
    lens = torch.tensor([NEAR * SIZE - 3], dtype=torch.int32)
    results = []
    for cache, blocks in ((far, LAST), (near, torch.arange(NEAR))):
        extension.cache_write(cache, keys, values, blocks[:3] * SIZE + 2)
        for tokens in (1, 40):
            cu_q, table = torch.tensor([0, tokens], dtype=torch.int32), blocks.to(torch.int32)[None]
            out = torch.empty(tokens, 2 * HEADS, DIM)
            extension.paged_attention(out, queries[:tokens], cache, cu_q, lens, table, 0.125)
            results.append(out)
    assert torch.equal(far[LAST], near)
    assert all(map(torch.equal, results[:2], results[2:]))
    assert (far[: 2 * NEAR] == 7.0).all()


def test_blocks_far_away(extension: ModuleType) -> None:
    torch.manual_seed(0)
    far = arena()[None]
    near = torch.randn(NEAR, 1, HEADS, 2, SIZE, DIM)
    packed, sums = torch.empty_like(near), torch.empty(2, NEAR, dtype=torch.int64)
    extension.scatter_blocks(far, near, LAST)
    assert torch.equal(far[0, LAST], near[:, 0])
    extension.gather_blocks(packed, far, LAST)
    assert torch.equal(packed, near)
    extension.checksum_blocks(sums[0], far, LAST)
    extension.checksum_blocks(sums[1], near.transpose(0, 1), torch.arange(NEAR))
    assert torch.equal(*sums)
    extension.copy_blocks(far, far, torch.stack((LAST[:2], LAST[2:4]), 1))
    assert torch.equal(far[0, LAST[2:4]], near[:2, 0])


def test_rows_far_apart(extension: ModuleType) -> None:
    torch.manual_seed(0)
    near, cos, sin, weight = torch.randn(2, 4, 32), torch.rand(2, 16), torch.rand(2, 16), torch.rand(128)
    far = memory().as_strided((2, 4, 32), (2**31, 32, 1)).copy_(near)
    results: list[list[Tensor]] = []
    for heads in (near, far):
        rows, normed, gated = heads.view(2, 128), torch.empty(2, 128), torch.empty(2, 64)
        extension.rms_norm(normed, rows, weight, 1e-5)
        extension.silu_and_mul(gated, rows)
        extension.rotary(heads, None, cos, sin, 32)
        results.append([heads, normed, gated])
    assert all(map(torch.equal, *results))
    data = memory()[: 2**31 + 2**12].view(-1, 32)
    wanted, looked_up = torch.tensor([len(data) - 3, 1]), torch.empty(2, 32)
    data[wanted] = torch.randn(2, 32)
    extension.weight_rows(looked_up, extension.Weight(data, "f32", *data.shape), wanted)
    assert torch.equal(looked_up, data[wanted])
