"""The ops as the worker calls them."""

from typing import Any

import _C_cuda_simt as native
from arrays import BF16, F32, TOLERANCE, close


def errors_stay_apart() -> None:
    """Where the CPU's module is loaded as well, each raises its own errors."""
    from gpu_worker.ops import native as modules

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


def ops_case(rng: Any) -> None:
    """NativeCudaOps against ReferenceOps, on CPU tensors."""
    import torch

    errors_stay_apart()

    from gpu_worker.ops import AttentionOptions, BlockSparsePattern, make_batch
    from gpu_worker.ops.native_cuda import NativeCudaOps
    from gpu_worker.ops.reference import ReferenceOps

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    ours, theirs = NativeCudaOps(native, cpu), ReferenceOps()
    torch.manual_seed(int(rng.integers(1 << 30)))
    dtype = [torch.float32, torch.bfloat16][int(rng.integers(2))]
    size, kv_heads, group, dim = int(rng.choice([8, 16])), 2, int(rng.choice([1, 3])), int(rng.choice([32, 64]))
    q_lens = [int(rng.choice([1, 1, 4, 20])) for _ in range(3)]
    kv_lens = [n + int(rng.choice([0, 5, 40])) for n in q_lens]
    blocks = [-(-n // size) for n in kv_lens]
    free = list(rng.permutation(sum(blocks) + 1))
    tables = [[int(free.pop()) for _ in range(n)] for n in blocks]
    positions = [p for q, n in zip(q_lens, kv_lens, strict=True) for p in range(n - q, n)]
    rows = [i for i, q in enumerate(q_lens) for _ in range(q)]
    slots = [tables[i][p // size] * size + p % size for i, p in zip(rows, positions, strict=True)]
    batch = make_batch([0] * len(rows), positions, slots, q_lens, kv_lens, tables, cpu)
    other = make_batch([0] * len(rows), positions, slots, q_lens, kv_lens, tables, cpu)
    kv = torch.randn(sum(blocks) + 1, kv_heads, 2, size, dim).to(dtype)
    twin = kv.clone()
    keys, values = torch.randn(2, len(rows), kv_heads, dim).to(dtype)
    ours.cache_write(kv, keys, values, batch)
    theirs.cache_write(twin, keys, values, other)
    assert torch.equal(kv, twin)
    queries = torch.randn(len(rows), kv_heads * group, dim).to(dtype)
    per_head = [torch.rand(kv_heads * group) if rng.random() < 0.5 else None for _ in range(2)]
    caps = {"window": int(rng.choice([0, 9])), "soft_cap": float(rng.choice([0, 2.5]))}
    sparse = BlockSparsePattern(1, 3, 8, int(rng.choice([-1, 0, 1]))) if rng.random() < 0.3 else None
    options = AttentionOptions(0.2, **caps, alibi=per_head[0], sinks=per_head[1], sparse=sparse)
    limit = TOLERANCE[F32 if dtype == torch.float32 else BF16]
    for _ in range(2):  # the second time from the kept plan
        got, want = (
            ours.paged_attention(queries, kv, batch, options),
            theirs.paged_attention(queries, kv, other, options),
        )
        close(got.double().numpy(), want.double().numpy(), limit, f"ops {q_lens=} {kv_lens=} {options=}")
    fixed = NativeCudaOps(native, cpu, batch_invariant=True)
    alone = make_batch(
        [0] * q_lens[0], positions[: q_lens[0]], slots[: q_lens[0]], q_lens[:1], kv_lens[:1], tables[:1], cpu
    )
    together = make_batch([0] * len(rows), positions, slots, q_lens, kv_lens, tables, cpu)
    first = fixed.paged_attention(queries[: q_lens[0]], kv, alone, options)
    assert torch.equal(first, fixed.paged_attention(queries, kv, together, options)[: q_lens[0]]), "bits of a batch"
    layers_case(ours, batch, kv.float(), dtype, queries, options)
    scaled_case(ours, kv.shape, (batch, other), (keys, values), queries, options)
    x, weight = torch.randn(len(rows), 64).to(dtype), torch.randn(64).to(dtype)
    sums = ours.add_rms_norm(x.clone(), x.flip(0), weight, 1e-5), theirs.add_rms_norm(x, x.flip(0), weight, 1e-5)
    for got, want in (
        *zip(*sums, strict=True),
        (ours.rms_norm(x, weight, 1e-5), theirs.rms_norm(x, weight, 1e-5)),
        (ours.silu_and_mul(x), theirs.silu_and_mul(x)),
        (ours.silu_and_mul(x[:0, None]), theirs.silu_and_mul(x[:0, None])),
    ):
        close(got.double().numpy(), want.double().numpy(), limit, "ops")
    arena = torch.randn(2, 6, 2, 2, 8, 8)
    copies = [(0, 1), (1, 2), (4, 5)] if rng.random() < 0.5 else [(0, 1), (2, 3)]
    want = arena.clone()
    theirs.copy_blocks(want, copies)
    ours.copy_blocks(arena, copies)
    assert torch.equal(arena, want)
    target = torch.zeros_like(arena)
    ours.swap_blocks(arena, target, [(0, 5), (1, 4)]).wait()
    assert torch.equal(target[:, 5], arena[:, 0]) and torch.equal(target[:, 4], arena[:, 1])


def layers_case(ops: Any, batch: Any, kv: Any, dtype: Any, queries: Any, options: Any) -> None:
    """What was rotated is what was written; layers of 8-bit floats are read as they are written."""
    import torch

    from gpu_worker.ops.reference import ReferenceOps

    heads, dim = kv.shape[1], kv.shape[4]
    keys, values = torch.randn(2, queries.shape[0], heads, dim).to(dtype)
    cos, sin = torch.rand(2, queries.shape[0], dim // 2).repeat(1, 1, 2)
    wide = kv.clone()
    want_queries = ReferenceOps().rotary_cache_write(
        wide, queries.float(), keys.float(), values.float(), cos, sin, batch
    )
    plain = kv.to(dtype)
    got_queries = ops.rotary_cache_write(plain, queries.clone(), keys, values, cos, sin, batch)
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    close(got_queries.double().numpy(), want_queries.double().numpy(), rounding, "rotary_cache_write")
    close(plain.double().numpy(), wide.double().numpy(), rounding, "rotary_cache_write")
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        stored = kv.to(kind)
        ops.cache_write(stored, keys, values, batch)
        got = ops.paged_attention(queries, stored, batch, options)
        want = ReferenceOps().paged_attention(queries.float(), stored.float(), batch, options)
        close(got.double().numpy(), want.double().numpy(), 1e-5 if queries.itemsize == 4 else 1.2e-2, f"ops {kind}")


def scaled_case(ops: Any, shape: Any, batches: Any, rows: Any, queries: Any, options: Any) -> None:
    """int8 with a scale for each slot: the same bytes as the reference ops write, and read as they read them."""
    import torch

    from gpu_worker.ops import kv_format
    from gpu_worker.ops.reference import ReferenceOps

    theirs, (keys, values) = ReferenceOps(), rows
    dim = shape[-1]
    mine = torch.zeros(*shape[:-1], kv_format.width(torch.int8, dim), dtype=torch.int8)
    keys = keys.clone()
    keys[0, 0] = 0  # whose scale is 0
    twin = mine.clone()
    ops.cache_write(mine, keys, values, batches[0])
    theirs.cache_write(twin, keys, values, batches[1])
    assert torch.equal(mine, twin)
    for odd in (torch.nan, torch.inf, 1e30, 1e-30):
        rows, pages = torch.full_like(keys, odd), (torch.zeros_like(mine), torch.zeros_like(mine))
        ops.cache_write(pages[0], rows, values, batches[0])
        theirs.cache_write(pages[1], rows, values, batches[1])
        assert torch.equal(*pages), odd
    got, want = (
        each.paged_attention(queries, kv, batch, options)
        for each, kv, batch in zip((ops, theirs), (mine, twin), batches, strict=True)
    )
    limit = 1e-5 if queries.itemsize == 4 else 1.2e-2
    close(got.double().numpy(), want.double().numpy(), limit, "int8 with a scale for each slot")
    cos, sin = torch.rand(2, queries.shape[0], dim // 2).repeat(1, 1, 2)
    ops.rotary_cache_write(mine, queries.clone(), keys.clone(), values, cos, sin, batches[0])
    theirs.rotary_cache_write(twin, queries.float(), keys.float(), values.float(), cos, sin, batches[1])
    read = [
        scales.double()[..., None] * numbers for numbers, scales in (kv_format.split(kv, dim) for kv in (mine, twin))
    ]
    close(read[0].numpy(), read[1].numpy(), 2e-2, "int8 with a scale for each slot, rotated")
