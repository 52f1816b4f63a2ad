"""The ops as the worker calls them."""

from typing import Any

import _C_cuda_simt as native
import torch
from arrays import BF16, F32, TOLERANCE, close

from gpu_worker.ops import AttentionOptions, BlockSparsePattern, kv_format, make_batch
from gpu_worker.ops import native as modules
from gpu_worker.ops.native_cuda import NativeCudaOps
from gpu_worker.ops.reference import ReferenceOps

CPU = torch.device("cpu")


def errors_stay_apart() -> None:
    """Where the CPU's module is loaded as well, each raises its own errors."""
    cpu = modules.load()
    if cpu is None:
        return
    for call, error in (
        (lambda: cpu.rms_norm(None, None, None, 1e-5), cpu.ArgumentError),
        (lambda: native.attention_kernel("none", F32, "auto", 64, 1), native.ArgumentError),
    ):
        try:
            call()
        except error:
            continue
        raise AssertionError("an op took a bad argument")


def near(got: Any, want: Any, limit: float, what: str) -> None:
    close(got.double().numpy(), want.double().numpy(), limit, what)


def ops_case(rng: Any) -> None:
    """NativeCudaOps against ReferenceOps, on CPU tensors."""
    errors_stay_apart()
    torch.set_num_threads(1)
    ours, theirs = NativeCudaOps(native, CPU), ReferenceOps()
    torch.manual_seed(int(rng.integers(1 << 30)))
    dtype = [torch.float32, torch.bfloat16][int(rng.integers(2))]
    size, kv_heads, group, dim = int(rng.choice([8, 16])), 2, int(rng.choice([1, 3])), int(rng.choice([32, 64]))
    q_lens = [int(rng.choice([1, 1, 4, 20])) for _ in range(3)]
    kv_lens = [n + int(rng.choice([0, 5, 40])) for n in q_lens]
    blocks = [-(-n // size) for n in kv_lens]
    free = list(rng.permutation(sum(blocks) + 1))
    tables = [[int(free.pop()) for _ in range(n)] for n in blocks]

    def batch_of(count: int) -> Any:
        """The first sequences."""
        lens = list(zip(q_lens[:count], kv_lens[:count], strict=True))
        places = [(i, p) for i, (q, n) in enumerate(lens) for p in range(n - q, n)]
        slots = [tables[i][p // size] * size + p % size for i, p in places]
        given = [0] * len(places), [p for _, p in places], slots, q_lens[:count], kv_lens[:count], tables[:count]
        return make_batch(*given, CPU)

    batch, other, rows = batch_of(3), batch_of(3), sum(q_lens)
    kv = torch.randn(sum(blocks) + 1, kv_heads, 2, size, dim).to(dtype)
    twin = kv.clone()
    keys, values = torch.randn(2, rows, kv_heads, dim).to(dtype)
    ours.cache_write(kv, keys, values, batch)
    theirs.cache_write(twin, keys, values, other)
    assert torch.equal(kv, twin)
    queries = torch.randn(rows, kv_heads * group, dim).to(dtype)
    per_head = [torch.rand(kv_heads * group) if rng.random() < 0.5 else None for _ in range(2)]
    caps = {"window": int(rng.choice([0, 9])), "soft_cap": float(rng.choice([0, 2.5]))}
    sparse = BlockSparsePattern(1, 3, 8, int(rng.choice([-1, 0, 1]))) if rng.random() < 0.3 else None
    options = AttentionOptions(0.2, **caps, alibi=per_head[0], sinks=per_head[1], sparse=sparse)
    limit = TOLERANCE[F32 if dtype == torch.float32 else BF16]
    for _ in range(2):  # the second time from the kept plan
        pair = ours.paged_attention(queries, kv, batch, options), theirs.paged_attention(queries, kv, other, options)
        near(*pair, limit, f"ops {q_lens=} {kv_lens=} {options=}")
    fixed = NativeCudaOps(native, CPU, batch_invariant=True)
    first = fixed.paged_attention(queries[: q_lens[0]], kv, batch_of(1), options)
    assert torch.equal(first, fixed.paged_attention(queries, kv, batch_of(3), options)[: q_lens[0]]), "bits of a batch"
    layers_case(ours, batch, kv.float(), dtype, queries, options)
    scaled_case(ours, kv.shape, (batch, other), (keys, values), queries, options)
    x, weight = torch.randn(rows, 64).to(dtype), torch.randn(64).to(dtype)
    sums = ours.add_rms_norm(x.clone(), x.flip(0), weight, 1e-5), theirs.add_rms_norm(x, x.flip(0), weight, 1e-5)
    for got, want in (
        *zip(*sums, strict=True),
        (ours.rms_norm(x, weight, 1e-5), theirs.rms_norm(x, weight, 1e-5)),
        (ours.silu_and_mul(x), theirs.silu_and_mul(x)),
        (ours.silu_and_mul(x[:0, None]), theirs.silu_and_mul(x[:0, None])),
    ):
        near(got, want, limit, "ops")
    arena = torch.randn(2, 6, 2, 2, 8, 8)
    copies = [(0, 1), (1, 2), (4, 5)] if rng.random() < 0.5 else [(0, 1), (2, 3)]
    want = arena.clone()
    theirs.copy_blocks(want, copies)
    ours.copy_blocks(arena, copies)
    assert torch.equal(arena, want)
    target = torch.zeros_like(arena)
    ours.swap_blocks(arena, target, [(0, 5), (1, 4)]).wait()
    assert torch.equal(target[:, [5, 4]], arena[:, :2])


def layers_case(ops: Any, batch: Any, kv: Any, dtype: Any, queries: Any, options: Any) -> None:
    """What was rotated is what was written; layers of 8-bit floats are read as they are written."""
    heads, dim = kv.shape[1], kv.shape[4]
    keys, values = torch.randn(2, queries.shape[0], heads, dim).to(dtype)
    cos, sin = torch.rand(2, queries.shape[0], dim // 2).repeat(1, 1, 2)
    wide, plain = kv.clone(), kv.to(dtype)
    given = [x.float() for x in (queries, keys, values)]
    want_queries = ReferenceOps().rotary_cache_write(wide, *given, cos, sin, batch)
    got_queries = ops.rotary_cache_write(plain, queries.clone(), keys, values, cos, sin, batch)
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    near(got_queries, want_queries, rounding, "rotary_cache_write")
    near(plain, wide, rounding, "rotary_cache_write")
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        stored = kv.to(kind)
        ops.cache_write(stored, keys, values, batch)
        got = ops.paged_attention(queries, stored, batch, options)
        want = ReferenceOps().paged_attention(queries.float(), stored.float(), batch, options)
        near(got, want, 1e-5 if queries.itemsize == 4 else 1.2e-2, f"ops {kind}")


def scaled_case(ops: Any, shape: Any, batches: Any, rows: Any, queries: Any, options: Any) -> None:
    """int8 with a scale for each slot: the same bytes as the reference ops write, and read as they read them."""
    theirs, (keys, values), dim = ReferenceOps(), rows, shape[-1]
    keys = keys.clone()
    keys[0, 0] = 0  # whose scale is 0
    mine, twin = torch.zeros(2, *shape[:-1], kv_format.width(torch.int8, dim), dtype=torch.int8)
    ops.cache_write(mine, keys, values, batches[0])
    theirs.cache_write(twin, keys, values, batches[1])
    assert torch.equal(mine, twin)
    for odd in (torch.nan, torch.inf, 1e30, 1e-30):
        rows, pages = torch.full_like(keys, odd), torch.zeros(2, *mine.shape, dtype=torch.int8)
        ops.cache_write(pages[0], rows, values, batches[0])
        theirs.cache_write(pages[1], rows, values, batches[1])
        assert torch.equal(*pages), odd
    each = zip((ops, theirs), (mine, twin), batches, strict=True)
    pair = [one.paged_attention(queries, kv, batch, options) for one, kv, batch in each]
    near(*pair, 1e-5 if queries.itemsize == 4 else 1.2e-2, "int8 with a scale for each slot")
    cos, sin = torch.rand(2, queries.shape[0], dim // 2).repeat(1, 1, 2)
    ops.rotary_cache_write(mine, queries.clone(), keys.clone(), values, cos, sin, batches[0])
    theirs.rotary_cache_write(twin, queries.float(), keys.float(), values.float(), cos, sin, batches[1])
    parts = [kv_format.split(kv, dim) for kv in (mine, twin)]
    read = [scales.double()[..., None] * numbers for numbers, scales in parts]
    near(*read, 2e-2, "int8 with a scale for each slot, rotated")
