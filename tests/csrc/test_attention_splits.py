"""A query has the same bits as a decode and in any piece of a prompt, also where keys are summed up split by split."""

import random

import pytest
import torch
from caches import KINDS, LAYOUTS, filled
from effort import diagonal, draws
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from instruction_sets import ISAS

SPLIT = 1024  # keys that are summed up before the sums are merged
BLOCK = 32
fuzz = settings(max_examples=draws(1, 40), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
seeds = st.integers(0, 2**32 - 1)
MASKS = {
    "all": {},
    "window": {"windows": (1, 5, 40, 700, SPLIT - 1, SPLIT, SPLIT + 1, 1500)},
    "cap": {"soft_cap": 2.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "bias": {"bias": True},
    "negative scale": {"scale": -0.2},
    "sparse": {"sparse": ((1, 2, 24, 1, 0), (0, 3, 64, -1, 0), (1, 2, SPLIT, 1, 0), (0, 3, 512, 1, 1))},
}


class History:
    """A sequence whose keys and values are all there, and what its queries get from them."""

    def __init__(self, seed: int, kind: str, mask: str) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        heads, group = rng.choice([(1, 1), (1, 3), (2, 2), (1, 7)])
        dim = rng.choice([32, 32, 64, 80, 128])
        self.length = rng.choice([SPLIT, SPLIT, SPLIT, SPLIT, 2 * SPLIT]) + rng.choice([1, 2, 3, 31, 64, 150])
        num_blocks = -(-self.length // BLOCK)
        self.kv = filled(rng, rng.choice(LAYOUTS), kind, num_blocks, heads, BLOCK, dim)
        self.table = torch.randperm(num_blocks).int()
        dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16])
        self.queries = torch.randn(self.length, heads * group, dim).to(dtype)
        of = MASKS[mask]
        self.options = {
            "scale": of.get("scale", 0.2),
            "window": rng.choice(of.get("windows", (0,))),
            "soft_cap": of.get("soft_cap", 0.0),
            "alibi": torch.rand(heads * group) if "alibi" in of else None,
            "sinks": torch.randn(heads * group) if "sinks" in of else None,
            "sparse": rng.choice(of.get("sparse", ((),))),
            "bias": torch.randn(heads * group, 2 * rng.choice([2, 90, SPLIT]) + 1) if "bias" in of else None,
        }

    def run(self, kernels, *spans: tuple[int, int]) -> torch.Tensor:
        """Runs queries [start, end) of each span, as sequences of one batch: bits."""
        queries, tables = torch.cat([self.queries[slice(*span)] for span in spans]), self.table.repeat(len(spans), 1)
        sizes = [end - start for start, end in spans], [end for _, end in spans]
        out = self.kv.attend(kernels, queries, *sizes, tables, **self.options)
        assert out.isfinite().all()
        return out.view(torch.int32 if out.dtype == torch.float32 else torch.int16)


def check(kernels, seed: int, kind: str, mask: str) -> None:
    """The last queries as decodes, as one piece, in pieces of odd sizes in a shuffled batch, and after others."""
    history, rng = History(seed, kind, mask), random.Random(seed)
    end = history.length
    first = end - rng.choice([2, 8, 16, 40, 65, 65, 200])
    alone = history.run(kernels, *((position, position + 1) for position in range(first, end)))
    assert torch.equal(history.run(kernels, (first, end)), alone)
    cuts, spans = first, []
    while cuts < end:
        spans.append((cuts, min(end, cuts + rng.choice([1, 2, 3, 8, 16, 64, 65, 200]))))
        cuts = spans[-1][1]
    rng.shuffle(spans)
    rows = torch.cat([torch.arange(*span) - first for span in spans])
    assert torch.equal(history.run(kernels, *spans), alone[rows])
    assert torch.equal(history.run(kernels, (end - 1, end)), alone[-1:])
    assert torch.equal(history.run(kernels, (max(0, first - 37), end))[-len(alone) :], alone)


@pytest.mark.scaled
@pytest.mark.parametrize(("kernels", "kind"), diagonal(ISAS, KINDS), indirect=["kernels"])
@fuzz
@given(seed=seeds, mask=st.sampled_from(sorted(MASKS)))
def test_a_row_of_a_piece_is_a_decode(kernels, kind, seed, mask):
    check(kernels, seed, kind, mask)


@pytest.mark.scaled
@pytest.mark.parametrize(("kernels", "mask"), diagonal(ISAS, sorted(MASKS)), indirect=["kernels"])
def test_no_mask_shows_where_a_prompt_was_cut(kernels, mask):
    for seed in range(draws(1, 2)):
        check(kernels, seed, "float32", mask)


@pytest.mark.parametrize("isa", ["avx512", "avx512_bf16"])
@fuzz
@given(seed=seeds, kind=st.sampled_from(KINDS), mask=st.sampled_from(sorted(MASKS)))
def test_wider_registers_change_no_bit(extension, isa, seed, kind, mask):
    """Registers of sixteen lanes sum up as those of eight do, where keys and values are multiplied in float32."""
    if not {isa, "avx2"} <= set(extension.isas()):
        pytest.skip(f"this machine has no {isa}, or it was not built")
    assume(isa == "avx512" or kind in ("float32", "float16"))
    history, best, found = History(seed, kind, mask), extension.isa(), []
    for name in ("avx2", isa):
        extension.select_isa(name)
        found.append(history.run(extension, (0, 40), (history.length - 70, history.length)))
    extension.select_isa(best)
    assert torch.equal(*found)
