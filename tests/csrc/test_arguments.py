"""What an op cannot work with is refused by name, before any memory is touched."""

import random

import pytest
import torch
from op_calls import Fence, good_call

I32 = torch.int32

# Instead of an argument of a good call: what only its op can know to be wrong. The fuzz test has what no op takes.
BAD = [
    ("rms_norm", "weight", torch.randn(7)),
    ("rotary", "rotated", 18),
    ("rotary", "rotated", 7),
    ("rotary", "rotated", -2),
    ("rotary", "positions", torch.tensor([0, 5])),
    ("rotary", "positions", torch.tensor([-1, 0])),
    ("cache_write", "slots", torch.tensor([3, 32])),
    ("cache_write", "slots", torch.tensor([3, -2])),
    ("cache_write", "keys", torch.randn(2, 1, 16)),
    ("paged_attention", "kv", torch.randn(4, 2, 2, 12, 16)),
    ("paged_attention", "kv", torch.randn(4, 2, 2, 8, 12)),
    ("paged_attention", "queries", torch.randn(2, 3, 16)),
    ("paged_attention", "cu_q", torch.tensor([0, 1, 3], dtype=I32)),
    ("paged_attention", "cu_q", torch.tensor([0, 3, 2], dtype=I32)),
    ("paged_attention", "seq_lens", torch.tensor([9, 0], dtype=I32)),
    ("paged_attention", "block_tables", torch.tensor([[0, 4], [2, 0]], dtype=I32)),
    ("paged_attention", "block_tables", torch.tensor([[0, -1], [2, 0]], dtype=I32)),
    ("paged_attention", "block_tables", torch.tensor([[0], [2]], dtype=I32)),
    ("paged_attention", "window", -1),
    ("paged_attention", "sparse", [1, 2, 0, 0, 0]),
    ("copy_blocks", "pairs", torch.tensor([[0, 4]])),
    ("copy_blocks", "pairs", torch.tensor([[-1, 0]])),
    ("gather_blocks", "ids", torch.tensor([4, 0])),
    ("gather_blocks", "begin", -1),
    ("scatter_blocks", "ids", torch.tensor([-1, 0])),
    ("scatter_blocks", "ids", torch.tensor([3, 3])),
    ("quantize", "format", "f32"),
]


@pytest.mark.parametrize(("op", "name", "value"), BAD)
def test_it_is_refused_by_name(either, op, name, value):
    fence = Fence()
    call = good_call(either, op, fence)
    call.arguments[name] = value
    with pytest.raises(either.ArgumentError, match=rf"^{name}: "):
        call()
    assert fence.is_whole([])


def test_weights_are_checked(either):
    with pytest.raises(either.ArgumentError, match=r"^packed: shape"):
        either.Weight(torch.empty(10, dtype=torch.uint8), "q4", 8, 32)
    with pytest.raises(either.ArgumentError, match=r"^cols: "):
        either.Weight(torch.empty(10, dtype=torch.uint8), "q4", 8, 33)
    for cols in (32, 288):
        with pytest.raises(either.ArgumentError, match=r"^cols: must be a multiple of 256"):
            either.Weight(torch.empty(10, dtype=torch.uint8), "q6_k", 8, cols)
    with pytest.raises(either.ArgumentError, match=r"^data: is float32"):
        either.Weight(torch.empty(8, 32), "bf16", 8, 32)
    weight = either.Weight(torch.randn(8, 32), "f32", 8, 32)
    with pytest.raises(either.ArgumentError, match=r"^x: shape"):
        either.linear(torch.empty(1, 8), torch.randn(1, 31), weight)
    with pytest.raises(either.ArgumentError, match=r"^bias: shape"):
        either.linear(torch.empty(1, 8), torch.randn(1, 32), weight, torch.randn(7))
    with pytest.raises(either.ArgumentError, match=r"^rows: "):
        either.weight_rows(torch.empty(1, 32), weight, torch.tensor([8]))
    with pytest.raises(either.ArgumentError, match=r"^isa: "):
        either.select_isa("sse9")


XPACK = torch.randn(4, 2, 4, 8, 4), torch.randn(4, 2, 16, 8)
ROWS, I8, E5M2 = (torch.empty(4, 2, 8, 16, dtype=t) for t in (torch.uint8, torch.int8, torch.float8_e5m2))


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("values", (torch.randn(4, 2, 3, 8, 4), XPACK[1])),
        ("values", (torch.randn(4, 2, 8, 12), torch.randn(4, 2, 8, 16))),
        ("values", (XPACK[0], torch.randn(4, 2, 16, 16))),
        ("values", (XPACK[0], XPACK[1].half())),
        ("keys", (*XPACK, "int8")),
        ("keys", (ROWS, ROWS)),
        ("type", (ROWS, ROWS, "int4")),
        ("keys", (E5M2, E5M2, "int8")),
        ("keys", (E5M2, E5M2, "fp8")),
        ("keys", (I8, I8, "fp8_e5m2")),
        ("key_scale", (ROWS, ROWS, "int8", torch.zeros(1), torch.ones(1))),
        ("key_scale", (ROWS, ROWS, "fp8", torch.tensor([1.0, -1.0]), torch.ones(2))),
        ("value_scale", (ROWS, ROWS, "fp8", torch.ones(2), torch.tensor([1.0, torch.nan]))),
        ("value_scale", (I8, I8, "auto", torch.ones(1), torch.tensor([torch.inf]))),
        ("key_scale", (ROWS, ROWS, "int8", torch.ones(3), torch.ones(2))),
        ("value_scale", (ROWS, ROWS, "int8", torch.ones(2), torch.ones(2).double())),
        ("key_scale", (torch.empty(4, 2, 2, 8, 18, dtype=torch.int8), None, "auto", torch.ones(1))),
        ("keys", (torch.empty(4, 2, 2, 9, 18, dtype=torch.int8)[:, :, :, :8].transpose(1, 3), None)),
    ],
)
def test_caches_are_checked(either, name, cache):
    with pytest.raises(either.ArgumentError, match=rf"^{name}: "):
        either.KvCache(*cache)


def test_runs_of_packed_keys_follow_each_other(either):
    """Kernels read those of eight slots at once."""
    keys, values = torch.zeros(2, 1, 4, 8, 8), torch.zeros(2, 1, 16, 8)
    new = {"keys": torch.ones(1, 1, 16), "values": torch.ones(1, 1, 16), "slots": torch.tensor([3])}
    either.cache_write(kv=either.KvCache(keys[..., :4].contiguous(), values), **new)
    with pytest.raises(either.ArgumentError, match="gaps between slots"):
        either.cache_write(kv=either.KvCache(keys[..., :4], values), **new)
    assert not keys.any()


def test_keys_and_values_of_one_tensor_may_be_given_apart(either):
    joint, apart = torch.zeros(2, 4, 3, 2, 8, 16)
    keys, values = torch.randn(2, 2, 3, 16)
    either.cache_write(joint, keys, values, torch.tensor([3, 17]))
    either.cache_write(either.KvCache(apart[:, :, 0], apart[:, :, 1]), keys, values, torch.tensor([3, 17]))
    assert torch.equal(joint, apart) and joint.any()
    with pytest.raises(ValueError, match=r"^kv: overlaps"):
        either.cache_write(either.KvCache(apart[:, :, 0], apart[:, :, 0]), keys, values, torch.tensor([3, 17]))


def test_what_overlaps_is_refused_and_what_only_interleaves_is_not(either):
    rng, memory, places = random.Random(0), torch.randn(800), torch.arange(800)
    kv = torch.randn(1, 1, 2, 8, 8)
    interleaved = refused = 0
    for _ in range(400):
        shape = [rng.randint(1, 3), rng.randint(1, 3), 8]
        inner = rng.randrange(2)

        def view(shape=shape, inner=inner, rng=rng):
            strides = [0, 0, 1]
            strides[inner] = rng.choice([8, 16, 24])
            strides[1 - inner] = strides[inner] * shape[inner] + rng.choice([0, 8, 40])
            return shape, strides, rng.randrange(0, 120, 4)

        where, other = view(), view()
        if rng.random() < 0.8:
            other = shape, where[1], other[2]
        count = torch.tensor([0, shape[0]], dtype=torch.int32)
        step = kv, count, count[1:], torch.zeros(1, 1, dtype=torch.int32), 1.0
        out, queries = memory.as_strided(*where), memory.as_strided(*other)
        held, read = (set(places.as_strided(*each).flatten().tolist()) for each in (where, other))
        if held & read:
            refused += 1
            with pytest.raises(ValueError, match=r"^out: overlaps"):
                either.paged_attention(out, queries, *step)
        elif where[1] == other[1]:
            interleaved += max(held) > min(read) and max(read) > min(held)
            either.paged_attention(out, queries, *step)
    assert interleaved > 30 and refused > 100
