"""Keys and values in 8 bits: the native ops store the very bytes that the reference stores, and read them alike."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpu_worker.ops import AttentionOptions, TokenBatch, choose_ops, kv_format, make_batch
from gpu_worker.ops.kv_format import KvShape
from gpu_worker.ops.reference import ReferenceOps
from gpu_worker.running.memory.arena import KvArena

torch.set_num_threads(1)
CPU = torch.device("cpu")
NATIVE, REFERENCE = choose_ops(CPU), ReferenceOps()
kinds = pytest.mark.parametrize("kind", kv_format.DTYPES)


def arena(kind: str, ops, num_blocks: int = 12, head_dim: int = 32) -> KvArena:
    shape = KvShape(num_layers=2, num_kv_heads=2, block_size=8, head_dim=head_dim, dtype=kv_format.DTYPES[kind])
    made = KvArena(shape, num_blocks, 4, CPU, ops)
    made.spoil(list(range(num_blocks)))
    return made


def step(q_lens: list[int], kv_lens: list[int], tables: list[list[int]]) -> TokenBatch:
    places = [p for q, n in zip(q_lens, kv_lens, strict=True) for p in range(n - q, n)]
    owners = [i for i, q in enumerate(q_lens) for _ in range(q)]
    slots = [tables[i][p // 8] * 8 + p % 8 for i, p in zip(owners, places, strict=True)]
    return make_batch([0] * len(places), places, slots, q_lens, kv_lens, tables, CPU)


@kinds
@settings(max_examples=15, deadline=None)
@example(seed=26355)  # of int8 a number halfway between two, which 1 / scale took to the other one
@given(seed=st.integers(0, 2**32 - 1))
def test_native_ops_are_the_reference(kind, seed):
    """Where native attention multiplies in bfloat16, each weight of a value is off by 2^-8 of itself at most."""
    torch.manual_seed(seed)
    largest = 0.0
    q_lens, kv_lens = [9, 1, 17], [9, 1, 17]
    order = torch.randperm(12).tolist()
    tables = [[order.pop() for _ in range(3)] for _ in kv_lens]
    ours, theirs = arena(kind, NATIVE), arena(kind, REFERENCE)
    for more in (0, 1, 2):
        batch = step(q_lens, [n + more for n in kv_lens], tables)
        size = torch.rand(()) * 4
        keys, values = torch.randn(2, batch.num_tokens, 2, 32) * size
        queries = torch.randn(batch.num_tokens, 6, 32).bfloat16().float()
        largest = max(largest, float(values.abs().max()))
        NATIVE.cache_write(ours.layers[1], keys, values, batch)
        REFERENCE.cache_write(theirs.layers[1], keys, values, batch)
        assert torch.equal(kv_format.raw(ours.layers[1]).nan_to_num(), kv_format.raw(theirs.layers[1]).nan_to_num())
        options = AttentionOptions(scale=0.2, window=0 if seed % 2 else 5)
        result = NATIVE.paged_attention(queries, ours.layers[1], batch, options)
        expected = REFERENCE.paged_attention(queries, theirs.layers[1], batch, options)
        rounding = 2**-8 * largest if kind not in ("float32", "float16") else 0
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4 + rounding)
        q_lens = [1, 1, 1]


@kinds
def test_what_is_read_is_near_what_was_written(kind):
    """Without any calibration, whatever the size of a key: to half a unit of its last place."""
    torch.manual_seed(0)
    cache = arena(kind, REFERENCE)
    keys = torch.randn(8, 2, 32) * torch.tensor([1e-2, 0.1, 1, 3, 10, 50, 100, 5]).view(8, 1, 1)
    batch = step([8], [8], [[3]])
    REFERENCE.cache_write(cache.layers[0], keys, -keys, batch)
    page = cache.layers[0][3]
    read = kv_format.decode(page, 32, torch.float32)
    units = {"float32": 0, "float16": 2**-11, "bfloat16": 2**-8, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3, "int8": 0}
    tops = keys.abs().amax(-1, keepdim=True)
    near = keys.abs() * units[kind] + (tops * 0.51 / 127 if kind == "int8" else 2**-10 if kind.startswith("fp8") else 0)
    assert ((read[:, 0].transpose(0, 1) - keys).abs() <= near + 1e-7).all()
    assert torch.equal(read[:, 0], -read[:, 1])


@pytest.mark.parametrize("ops", [NATIVE, REFERENCE], ids=["native", "reference"])
def test_integers_saturate_where_float16_ends(ops):
    cache, keys = arena("int8", ops), torch.ones(3, 2, 32) * torch.tensor([8e6, 1e7, -3e38]).view(3, 1, 1)
    ops.cache_write(cache.layers[0], keys, keys, step([3], [3], [[3]]))
    read = kv_format.decode(cache.layers[0][3], 32, torch.float32)[:, :, :3].transpose(0, 2)
    expected = keys.clamp(-127 * 65504, 127 * 65504)[:, None].expand(3, 2, 2, 32)
    torch.testing.assert_close(read, expected, rtol=1e-3, atol=0)


@kinds
@pytest.mark.parametrize("ops", [NATIVE, REFERENCE], ids=["native", "reference"])
def test_blocks_move_with_their_scales(kind, ops):
    cache = arena(kind, ops)
    batch = step([24], [24], [[3, 5, 7]])
    for layer in cache.layers:
        ops.cache_write(layer, torch.randn(24, 2, 32), torch.randn(24, 2, 32), batch)
    before = kv_format.raw(cache._device).clone()
    cache.swap_out([(3, 0), (5, 2)])
    cache.spoil([3, 5])
    assert kv_format.decode(cache.layers[0][3], 32, torch.float32).isnan().all()
    cache.swap_in([(0, 9), (2, 3)])
    cache.copy([(7, 1), (9, 10)])
    after = kv_format.raw(cache._device)
    for source, target in ((3, 9), (5, 3), (7, 1), (3, 10)):
        assert torch.equal(after[:, target], before[:, source])


def test_forms_are_told_apart():
    shapes = {kind: arena(kind, REFERENCE).shape for kind in kv_format.DTYPES}
    assert len({shape.layout for shape in shapes.values()}) == len(shapes)
    assert [shape.dtype_name for shape in shapes.values()] == list(shapes)
    sizes = {kind: shape.bytes_per_block for kind, shape in shapes.items()}
    assert sizes["float32"] == 4 * sizes["fp8_e4m3"] and sizes["int8"] == sizes["fp8_e5m2"] * 34 // 32


def test_a_broken_key_stays_broken():
    keys = torch.ones(1, 2, 32)
    keys[0, 1, 7] = float("nan")
    for kind in kv_format.DTYPES:
        for ops in (NATIVE, REFERENCE):
            cache = arena(kind, ops)
            batch = step([1], [1], [[0]])
            ops.cache_write(cache.layers[0], keys, torch.ones(1, 2, 32), batch)
            assert kv_format.decode(cache.layers[0][0, 1, 0], 32, torch.float32)[0].isnan().any()
            result = NATIVE.paged_attention(torch.ones(1, 2, 32), cache.layers[0], batch, AttentionOptions(scale=1.0))
            near = 1e-3 if kind == "int8" else 0
            torch.testing.assert_close(result[0, 0], torch.ones(32), rtol=near, atol=0)
            assert type(NATIVE) is ReferenceOps or result[0, 1].isnan().all(), (kind, ops.name)
            assert ops.silu_and_mul(torch.empty(0, 32)).shape == (0, 16), "of no rows there are no results"
            assert ops.linear(torch.empty(0, 32), torch.ones(8, 32)).shape == (0, 8)


@kinds
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_pages_of_fewer_wider_heads_lie_in_the_same_blocks(kind, seed):
    """Layers whose keys have other shapes share an arena; what is written as one is read as that, by all ops alike."""
    torch.manual_seed(seed)
    ours, theirs = arena(kind, NATIVE), arena(kind, REFERENCE)
    batch = step([9, 1], [9, 1], [[3, 0], [7, 8]])
    keys, values, queries = torch.randn(3, batch.num_tokens, 1, 40).bfloat16().float()
    results = []
    for ops, each in ((NATIVE, ours), (REFERENCE, theirs)):
        pages = kv_format.paged_as(each.layers[1], 1, 40)
        ops.cache_write(pages, keys, values, batch)
        results.append(ops.paged_attention(queries.contiguous(), pages, batch, AttentionOptions(scale=0.2)))
    assert torch.equal(kv_format.raw(ours.layers[1]).nan_to_num(), kv_format.raw(theirs.layers[1]).nan_to_num())
    rounding = 2**-8 * float(values.abs().max()) if kind not in ("float32", "float16") else 0
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4 + rounding)
