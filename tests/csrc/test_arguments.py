"""What an op cannot work with is refused by name, before any memory is touched."""

import random

import pytest
import torch
from op_calls import Fence, good_call
from torch import empty, ones, randn, tensor, zeros

I32, U8 = torch.int32, torch.uint8

# Instead of an argument of a good call: what only its op can know to be wrong. The fuzz test has what no op takes.
BAD = {
    ("rms_norm", "weight"): [randn(7)],
    ("rotary", "rotated"): [18, 7, -2],
    ("rotary", "positions"): [tensor([0, 5]), tensor([-1, 0])],
    ("cache_write", "slots"): [tensor([3, 32]), tensor([3, -2])],
    ("cache_write", "keys"): [randn(2, 1, 16)],
    ("paged_attention", "kv"): [randn(4, 2, 2, 12, 16), randn(4, 2, 2, 8, 12)],
    ("paged_attention", "queries"): [randn(2, 3, 16)],
    ("paged_attention", "cu_q"): [tensor([0, 1, 3], dtype=I32), tensor([0, 3, 2], dtype=I32)],
    ("paged_attention", "seq_lens"): [tensor([9, 0], dtype=I32)],
    ("paged_attention", "block_tables"): [
        tensor(tables, dtype=I32) for tables in ([[0, 4], [2, 0]], [[0, -1], [2, 0]], [[0], [2]])
    ],
    ("paged_attention", "window"): [-1],
    ("paged_attention", "sparse"): [[1, 2, 0, 0, 0]],
    ("copy_blocks", "pairs"): [tensor([[0, 4]]), tensor([[-1, 0]])],
    ("gather_blocks", "ids"): [tensor([4, 0])],
    ("gather_blocks", "begin"): [-1],
    ("scatter_blocks", "ids"): [tensor([-1, 0]), tensor([3, 3])],
    ("quantize", "format"): ["f32"],
}


@pytest.mark.parametrize(("op", "name"), BAD)
def test_it_is_refused_by_name(either, op, name):
    for value in BAD[op, name]:
        fence = Fence()
        call = good_call(either, op, fence)
        call.arguments[name] = value
        with pytest.raises(either.ArgumentError, match=rf"^{name}: "):
            call()
        assert fence.is_whole([])


def test_weights_are_checked(either):
    data, good = empty(10, dtype=U8), either.Weight(randn(8, 32), "f32", 8, 32)
    for says, call, *given in (
        ("packed: shape", either.Weight, data, "q4", 8, 32),
        ("cols: ", either.Weight, data, "q4", 8, 33),
        ("cols: must be a multiple of 256", either.Weight, data, "q6_k", 8, 32),
        ("cols: must be a multiple of 256", either.Weight, data, "q6_k", 8, 288),
        ("data: is float32", either.Weight, empty(8, 32), "bf16", 8, 32),
        ("x: shape", either.linear, empty(1, 8), randn(1, 31), good),
        ("bias: shape", either.linear, empty(1, 8), randn(1, 32), good, randn(7)),
        ("rows: ", either.weight_rows, empty(1, 32), good, tensor([8])),
        ("isa: ", either.select_isa, "sse9"),
    ):
        with pytest.raises(either.ArgumentError, match=f"^{says}"):
            call(*given)


XPACK = randn(4, 2, 4, 8, 4), randn(4, 2, 16, 8)
ROWS, I8, E5M2 = (empty(4, 2, 8, 16, dtype=t) for t in (U8, torch.int8, torch.float8_e5m2))
CACHES = {
    "values": [
        (randn(4, 2, 3, 8, 4), XPACK[1]),
        (randn(4, 2, 8, 12), randn(4, 2, 8, 16)),
        (XPACK[0], randn(4, 2, 16, 16)),
        (XPACK[0], XPACK[1].half()),
    ],
    "keys": [
        (*XPACK, "int8"),
        (ROWS, ROWS),
        (E5M2, E5M2, "int8"),
        (E5M2, E5M2, "fp8"),
        (I8, I8, "fp8_e5m2"),
        (empty(4, 2, 2, 9, 18, dtype=torch.int8)[:, :, :, :8].transpose(1, 3), None),
    ],
    "type": [(ROWS, ROWS, "int4")],
    "key_scale": [
        (ROWS, ROWS, "int8", zeros(1), ones(1)),
        (ROWS, ROWS, "fp8", tensor([1.0, -1.0]), ones(2)),
        (ROWS, ROWS, "int8", ones(3), ones(2)),
        (empty(4, 2, 2, 8, 18, dtype=torch.int8), None, "auto", ones(1)),
    ],
    "value_scale": [
        (ROWS, ROWS, "fp8", ones(2), tensor([1.0, torch.nan])),
        (I8, I8, "auto", ones(1), tensor([torch.inf])),
        (ROWS, ROWS, "int8", ones(2), ones(2).double()),
    ],
}


@pytest.mark.parametrize("name", CACHES)
def test_caches_are_checked(either, name):
    for cache in CACHES[name]:
        with pytest.raises(either.ArgumentError, match=rf"^{name}: "):
            either.KvCache(*cache)


def test_keys_and_values_may_be_given_apart_without_gaps_and_overlaps(either):
    joint, apart = zeros(2, 4, 3, 2, 8, 16)
    new = {"keys": randn(2, 3, 16), "values": randn(2, 3, 16), "slots": tensor([3, 17])}
    either.cache_write(joint, **new)
    either.cache_write(either.KvCache(apart[:, :, 0], apart[:, :, 1]), **new)
    assert torch.equal(joint, apart) and joint.any()
    with pytest.raises(ValueError, match=r"^kv: overlaps"):
        either.cache_write(either.KvCache(apart[:, :, 0], apart[:, :, 0]), **new)
    # Kernels read packed keys of eight slots at once: these follow each other.
    keys, values = zeros(2, 1, 4, 8, 8), zeros(2, 1, 16, 8)
    new = {"keys": ones(1, 1, 16), "values": ones(1, 1, 16), "slots": tensor([3])}
    either.cache_write(kv=either.KvCache(keys[..., :4].contiguous(), values), **new)
    with pytest.raises(either.ArgumentError, match="gaps between slots"):
        either.cache_write(kv=either.KvCache(keys[..., :4], values), **new)
    assert not keys.any()


def test_what_overlaps_is_refused_and_what_only_interleaves_is_not(either):
    rng, memory, places = random.Random(0), randn(800), torch.arange(800)
    interleaved = refused = 0
    for _ in range(400):
        shape, inner = [rng.randint(1, 3), rng.randint(1, 3), 8], rng.randrange(2)

        def view(shape=shape, inner=inner):
            strides = [0, 0, 1]
            strides[inner] = rng.choice([8, 16, 24])
            strides[1 - inner] = strides[inner] * shape[inner] + rng.choice([0, 8, 40])
            return shape, strides, rng.randrange(0, 120, 4)

        where, other = view(), view()
        if rng.random() < 0.8:
            other = shape, where[1], other[2]
        count = tensor([0, shape[0]], dtype=I32)
        step = randn(1, 1, 2, 8, 8), count, count[1:], zeros(1, 1, dtype=I32), 1.0
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
