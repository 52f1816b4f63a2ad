"""What an op cannot work with is refused by name, before any memory is touched."""

import random

import pytest
import torch

from gpu_worker.ops import native

X, OUT, W = torch.randn(2, 8), torch.empty(2, 8), torch.randn(8)
KV = torch.randn(4, 2, 2, 8, 16)
Q = torch.randn(2, 4, 16)
CU, LENS = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([9, 3], dtype=torch.int32)
TABLES = torch.tensor([[0, 1], [2, 99]], dtype=torch.int32)
ARENA = torch.randn(2, 4, 3)

GOOD = {
    "rms_norm": {"out": OUT, "x": X, "weight": W, "eps": 1e-5},
    "silu_and_mul": {"out": torch.empty(2, 4), "x": X},
    "rotary": {
        "heads": torch.randn(2, 4, 16),
        "positions": None,
        "cos": torch.ones(2, 8),
        "sin": torch.ones(2, 8),
        "rotated": 16,
    },
    "cache_write": {
        "kv": KV,
        "keys": torch.randn(2, 2, 16),
        "values": torch.randn(2, 2, 16),
        "slots": torch.tensor([3, -1]),
    },
    "paged_attention": {
        "out": torch.empty(2, 4, 16),
        "queries": Q,
        "kv": KV,
        "cu_q": CU,
        "seq_lens": LENS,
        "block_tables": TABLES,
        "scale": 0.3,
    },
    "copy_blocks": {"source": ARENA, "target": ARENA, "pairs": torch.tensor([[0, 1]])},
    "gather_blocks": {"staging": torch.empty(1, 2, 3), "arena": ARENA, "ids": torch.tensor([3])},
    "scatter_blocks": {"arena": ARENA, "staging": torch.empty(1, 2, 3), "ids": torch.tensor([3])},
    "checksum_blocks": {"sums": torch.empty(1, dtype=torch.int64), "arena": ARENA, "ids": torch.tensor([3])},
    "quantize": {"packed": torch.empty(0, dtype=torch.uint8), "values": torch.randn(3, 32), "format": "q8"},
}
if native.load() is not None:
    GOOD["quantize"]["packed"] = torch.empty(native.load().packed_bytes("q8", 3, 32), dtype=torch.uint8)

BAD = [
    ("rms_norm", "x", X.double()),
    ("rms_norm", "x", X.to("meta")),
    ("rms_norm", "x", None),
    ("rms_norm", "x", 3),
    ("rms_norm", "x", torch.randn(8, 2).T),
    ("rms_norm", "out", torch.empty(2, 7)),
    ("rms_norm", "out", torch.empty(2, 8, dtype=torch.float16)),
    ("rms_norm", "weight", W[:7]),
    ("rms_norm", "weight", W.half()),
    ("silu_and_mul", "x", torch.randn(2, 7)),
    ("rotary", "rotated", 18),
    ("rotary", "rotated", 15),
    ("rotary", "rotated", -2),
    ("rotary", "cos", torch.ones(2, 7)),
    ("rotary", "cos", torch.ones(2, 8).double()),
    ("rotary", "sin", torch.ones(1, 8)),
    ("rotary", "positions", torch.tensor([0, 2])),
    ("rotary", "positions", torch.tensor([-1, 0])),
    ("cache_write", "slots", torch.tensor([3, 32])),
    ("cache_write", "slots", torch.tensor([3, -2])),
    ("cache_write", "slots", torch.tensor([3, 4], dtype=torch.int32)),
    ("cache_write", "keys", torch.randn(2, 1, 16)),
    ("cache_write", "values", torch.randn(2, 2, 16).half()),
    ("cache_write", "kv", torch.randn(4, 2, 3, 8, 16)),
    ("paged_attention", "kv", torch.randn(4, 2, 2, 12, 16)),
    ("paged_attention", "kv", torch.randn(4, 2, 2, 8, 12)),
    ("paged_attention", "kv", KV.to(torch.int32)),
    ("paged_attention", "kv", KV.transpose(3, 4)),
    ("paged_attention", "queries", torch.randn(2, 3, 16)),
    ("paged_attention", "kv", torch.randn(4, 2, 2, 8, 24)),
    ("paged_attention", "out", torch.empty(2, 4, 16).half()),
    ("paged_attention", "cu_q", torch.tensor([0, 1, 3], dtype=torch.int32)),
    ("paged_attention", "cu_q", torch.tensor([0, 3, 2], dtype=torch.int32)),
    ("paged_attention", "seq_lens", torch.tensor([9, 0], dtype=torch.int32)),
    ("paged_attention", "block_tables", torch.tensor([[0, 4], [2, 0]], dtype=torch.int32)),
    ("paged_attention", "block_tables", torch.tensor([[0, -1], [2, 0]], dtype=torch.int32)),
    ("paged_attention", "block_tables", torch.tensor([[0], [2]], dtype=torch.int32)),
    ("paged_attention", "alibi", torch.randn(3)),
    ("paged_attention", "sinks", torch.randn(4).double()),
    ("paged_attention", "window", -1),
    ("paged_attention", "sparse", [1, 2, 64]),
    ("paged_attention", "sparse", [1, 2, 0, 0, 0]),
    ("paged_attention", "sparse", [-1, 2, 64, 0, 0]),
    ("copy_blocks", "pairs", torch.tensor([[0, 4]])),
    ("copy_blocks", "pairs", torch.tensor([[-1, 0]])),
    ("copy_blocks", "pairs", torch.tensor([[0, 3], [1, 2], [2, 3]])),
    ("copy_blocks", "target", torch.randn(2, 4, 4)),
    ("copy_blocks", "source", torch.randn(2, 4, 3, 2).transpose(2, 3)),
    ("gather_blocks", "ids", torch.tensor([4])),
    ("gather_blocks", "staging", torch.empty(2, 2, 3)),
    ("gather_blocks", "staging", torch.empty(1, 2, 4)),
    ("gather_blocks", "begin", -1),
    ("gather_blocks", "begin", 13),
    ("scatter_blocks", "staging", torch.empty(1, 3, 2)),
    ("scatter_blocks", "ids", torch.tensor([-1])),
    ("checksum_blocks", "sums", torch.empty(2, dtype=torch.int64)),
    ("quantize", "packed", torch.empty(100, dtype=torch.uint8)),
    ("quantize", "cols", torch.randn(3, 33)),
    ("quantize", "format", "q5"),
    ("quantize", "format", "f32"),
]


@pytest.mark.parametrize("op", GOOD)
def test_the_others_are_taken(either, op):
    getattr(either, op)(**GOOD[op])


@pytest.mark.parametrize(("op", "name", "value"), BAD)
def test_it_is_refused_by_name(either, op, name, value):
    where = {"cols": "values"}.get(name, name)
    arguments = {**GOOD[op], where: value}
    tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor) and not x.is_meta]
    before = [x.clone() for x in tensors]
    with pytest.raises(either.ArgumentError, match=rf"^{name}: "):
        getattr(either, op)(**arguments)
    for x, kept in zip(tensors, before, strict=True):
        torch.testing.assert_close(x, kept, rtol=0, atol=0, equal_nan=True)


def test_no_block_is_scattered_to_twice(either):
    arena, packed = torch.zeros(2, 4, 3), torch.ones(2, 2, 3)
    with pytest.raises(either.ArgumentError, match=r"^ids: writes a block twice"):
        either.scatter_blocks(arena, packed, torch.tensor([3, 3]))
    assert not arena.any()


def test_weights_are_checked(either):
    with pytest.raises(either.ArgumentError, match=r"^packed: shape"):
        either.Weight(torch.empty(10, dtype=torch.uint8), "q4", 8, 32)
    with pytest.raises(either.ArgumentError, match=r"^cols: "):
        either.Weight(torch.empty(10, dtype=torch.uint8), "q4", 8, 33)
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
