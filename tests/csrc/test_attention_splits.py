"""A query has the same bits as a decode and in any piece of a prompt, also where keys are summed up split by split."""

import random

import pytest
import torch
from caches import KINDS, LAYOUTS, Cache
from effort import diagonal, draws
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from instruction_sets import KERNELS

SPLIT = 1024  # keys that are summed up before the sums are merged
BLOCK = 32

fuzz = settings(max_examples=draws(1, 40), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
MASKS = {
    "all": {},
    "window": {"windows": (1, 5, 40, 700, SPLIT - 1, SPLIT, SPLIT + 1, 1500)},
    "cap": {"soft_cap": 2.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "negative scale": {"scale": -0.2},
    "sparse": {"sparse": ((1, 2, 24, 1, 0), (0, 3, 64, -1, 0), (1, 2, SPLIT, 1, 0), (0, 3, 512, 1, 1))},
}


def filled(rng: random.Random, kind: str, layout: str, heads: int, dim: int, num_blocks: int) -> Cache:
    """Each slot holds something, of any size that does not overflow."""
    cache = Cache(rng, layout, kind, num_blocks, heads, BLOCK, dim)
    for part in cache.parts:
        if cache.dtype.itemsize > 1:
            part.copy_(torch.randn(part.shape))
        else:
            part.view(torch.uint8).random_(0, 256 if "int8" in kind else 90)
            part.view(torch.uint8).bitwise_or_(torch.randint(0, 2, part.shape, dtype=torch.uint8) << 7)
    for side in range(2 * (kind == "int8_paged")):
        cache.slot_scales(side).copy_(torch.rand(num_blocks, heads, BLOCK) / 50)
    return cache


class History:
    """A sequence whose keys and values are all there, and what its queries get from them."""

    def __init__(self, seed: int, kind: str, mask: str) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.heads, self.group = rng.choice([(1, 1), (1, 3), (2, 2), (1, 7)])
        self.dim = rng.choice([32, 32, 64, 80, 128])
        self.length = rng.choice([SPLIT, SPLIT, SPLIT, SPLIT, 2 * SPLIT]) + rng.choice([1, 2, 3, 31, 64, 150])
        num_blocks = -(-self.length // BLOCK)
        self.kv = filled(rng, kind, rng.choice(LAYOUTS), self.heads, self.dim, num_blocks)
        self.table = torch.randperm(num_blocks).int()
        dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16])
        self.queries = torch.randn(self.length, self.heads * self.group, self.dim).to(dtype)
        of = MASKS[mask]
        per_head = self.heads * self.group
        self.options = {
            "scale": of.get("scale", 0.2),
            "window": rng.choice(of.get("windows", (0,))),
            "soft_cap": of.get("soft_cap", 0.0),
            "alibi": torch.rand(per_head) if "alibi" in of else None,
            "sinks": torch.randn(per_head) if "sinks" in of else None,
            "sparse": rng.choice(of.get("sparse", ((),))),
        }

    def run(self, kernels, spans: list[tuple[int, int]]) -> torch.Tensor:
        """Runs queries [start, end) of each span, as sequences of one batch: bits."""
        queries = torch.cat([self.queries[start:end] for start, end in spans])
        out = torch.full(queries.shape, float("nan"), dtype=queries.dtype)
        cu_q = torch.tensor([0, *(end - start for start, end in spans)]).cumsum(0).int()
        seq_lens = torch.tensor([end for _, end in spans], dtype=torch.int32)
        tables = self.table.expand(len(spans), -1).contiguous()
        kernels.paged_attention(out, queries, self.kv.handle(kernels), cu_q, seq_lens, tables, **self.options)
        assert out.isfinite().all()
        return out.view(torch.int32 if out.dtype == torch.float32 else torch.int16)


def pieces(rng: random.Random, first: int, end: int) -> list[tuple[int, int]]:
    """Queries [first, end) in pieces of odd sizes, in a shuffled batch."""
    spans = []
    while first < end:
        next_ = min(end, first + rng.choice([1, 2, 3, 8, 16, 64, 65, 200]))
        spans.append((first, next_))
        first = next_
    rng.shuffle(spans)
    return spans


def check(kernels, seed: int, kind: str, mask: str) -> None:
    history = History(seed, kind, mask)
    rng = random.Random(seed)
    end = history.length
    first = end - rng.choice([2, 8, 16, 40, 65, 65, 200])
    alone = history.run(kernels, [(position, position + 1) for position in range(first, end)])
    assert torch.equal(history.run(kernels, [(first, end)]), alone)
    spans = pieces(rng, first, end)
    rows = torch.cat([torch.arange(*span) - first for span in spans])
    assert torch.equal(history.run(kernels, spans), alone[rows])
    assert torch.equal(history.run(kernels, [(end - 1, end)]), alone[-1:])
    assert torch.equal(history.run(kernels, [(max(0, first - 37), end)])[-len(alone) :], alone)


@pytest.mark.scaled
@pytest.mark.parametrize(("kernels", "kind"), diagonal(KERNELS, KINDS), indirect=["kernels"])
@fuzz
@given(seed=st.integers(0, 2**32 - 1), mask=st.sampled_from(sorted(MASKS)))
def test_a_row_of_a_piece_is_a_decode(kernels, kind, seed, mask):
    check(kernels, seed, kind, mask)


@pytest.mark.scaled
@pytest.mark.parametrize(("kernels", "mask"), diagonal(KERNELS, sorted(MASKS)), indirect=["kernels"])
def test_no_mask_shows_where_a_prompt_was_cut(kernels, mask):
    for seed in range(draws(1, 2)):
        check(kernels, seed, "float32", mask)


@pytest.mark.parametrize("isa", ["avx512", "avx512_bf16"])
@fuzz
@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(KINDS), mask=st.sampled_from(sorted(MASKS)))
def test_wider_registers_change_no_bit(extension, isa, seed, kind, mask):
    """Registers of sixteen lanes sum up as those of eight do, where keys and values are multiplied in float32."""
    if not {isa, "avx2"} <= set(extension.isas()):
        pytest.skip(f"this machine has no {isa}, or it was not built")
    assume(isa == "avx512" or kind in ("float32", "float16"))
    history, best, found = History(seed, kind, mask), extension.isa(), []
    for name in ("avx2", isa):
        extension.select_isa(name)
        found.append(history.run(extension, [(0, 40), (history.length - 70, history.length)]))
    extension.select_isa(best)
    assert torch.equal(*found)
