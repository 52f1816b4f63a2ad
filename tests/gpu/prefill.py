"""Prefill attention against the matrix units and torch SDPA on dense keys."""

import torch
from decode import BLOCK
from target import Target, target
from timing import Call, medians, ratio
from torch.nn import functional

from gpu_worker.ops import AttentionOptions, make_batch
from gpu_worker.ops.native_cuda import NativeCudaOps

HEADS, KV_HEADS = 32, 8


def compare(t: Target, tokens: int, before: int, head_dim: int) -> tuple[dict[str, float], float]:
    """Seconds, and floating-point operations, of one chunk after `before` tokens."""
    length = tokens + before
    count = -(-length // BLOCK)
    order = torch.randperm(count).tolist()
    positions = list(range(before, length))
    slots = [order[p // BLOCK] * BLOCK + p % BLOCK for p in positions]
    batch = make_batch([0] * tokens, positions, slots, [tokens], [length], [order], t.device)
    kv = torch.randn(count, KV_HEADS, 2, BLOCK, head_dim, device=t.device).to(torch.bfloat16)
    queries = torch.randn(tokens, HEADS, head_dim, device=t.device).to(torch.bfloat16)
    options = AttentionOptions(head_dim**-0.5)
    ops = NativeCudaOps(t.extension, t.device)
    got = ops.paged_attention(queries, kv, batch, options)  # plans
    calls: dict[str, Call] = {"ours": lambda i: ops.paged_attention(queries, kv, batch, options)}
    if not before:
        dense = kv[torch.tensor(order, device=t.device)].permute(2, 1, 0, 3, 4).flatten(2, 3)[:, None, :, :length]

        def sdpa(number: int) -> torch.Tensor:
            return functional.scaled_dot_product_attention(
                queries.transpose(0, 1)[None], *dense, is_causal=True, scale=options.scale, enable_gqa=True
            )

        calls["sdpa"] = sdpa
        want = sdpa(0)[0].transpose(0, 1)
        error = float((got.float() - want.float()).norm() / want.float().norm())
        assert error < 2e-2, f"{tokens} tokens: ours differs from SDPA by {error:.2e}"
    pairs = tokens * before + tokens * (tokens + 1) // 2
    return medians(t, calls, 1, 9), 4.0 * pairs * HEADS * head_dim


def main() -> None:
    t = target()
    torch.manual_seed(0)
    rows = []
    for tokens, before in t.pick([(512, 0), (2048, 0), (8192, 0), (2048, 14336), (256, 32512)], [(9, 0), (5, 20)]):
        times, work = compare(t, tokens, before, t.pick(128, 64))
        rate = work / times["ours"] / 1e12
        rows.append((tokens, before, f"{times['ours'] * 1e3:.3f}", f"{rate:.0f}", ratio(times, "ours", "sdpa")))
    t.table("Prefill attention, bfloat16, 32/8/128", ("tokens", "after", "ms", "TFLOP/s", "SDPA dense"), rows)
    t.finish()


if __name__ == "__main__":
    main()
