"""Tokens that change a matrix, one after another: against the definition, and in any division of rows and columns."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpu_worker.ops.reference import ReferenceOps

fuzz = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
sizes = st.integers(1, 70)


def example(
    seed: int, tokens: int, shape: tuple[int, int, int, int], per_key: bool, delta: bool
) -> list[Tensor | None]:
    """State, queries, keys, values, decays and rates. `shape`: heads with one key, as many of these, rows, columns."""
    torch.manual_seed(seed)
    group, key_heads, rows, columns = shape
    heads = group * key_heads
    queries, keys = torch.randn(2, tokens, key_heads, rows) * rows**-0.5
    decays = torch.rand(tokens, heads, rows) if per_key else torch.rand(tokens, heads)
    state, values = torch.randn(heads, rows, columns), torch.randn(tokens, heads, columns)
    return [state, queries, keys, values, decays, torch.rand(tokens, heads) if delta else None]


def recur(kernels, given: list[Tensor | None], part: slice = slice(None)) -> Tensor:
    state, *rest = given
    some = [None if x is None else x[part].contiguous() for x in rest]
    out = torch.empty_like(some[2])
    kernels.linear_recurrence(out, state, *some)
    return out


each_rule = pytest.mark.parametrize("delta", [False, True], ids=["plain", "delta"])


@each_rule
@pytest.mark.parametrize("per_key", [False, True], ids=["per head", "per key"])
@fuzz
@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(0, 5), rows=sizes, columns=sizes | st.just(1))
def test_what_tokens_read_and_leave(kernels, delta, per_key, seed, tokens, rows, columns):
    given = example(seed, tokens, (1 + seed % 3, 2, rows, columns), per_key, delta)
    wide = [None if x is None else x.double() for x in given]
    expected = ReferenceOps().linear_recurrence(*wide)
    torch.testing.assert_close(recur(kernels, given).double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(given[0].double(), wide[0], rtol=1e-4, atol=1e-5)


@each_rule
@fuzz
@given(seed=st.integers(0, 2**32 - 1), cut=st.integers(0, 9), rows=sizes, columns=sizes | st.just(1))
def test_bits_do_not_depend_on_pieces_and_columns(kernels, delta, seed, cut, rows, columns):
    whole, pieces, alone = (example(seed, 9, (2, 2, rows, columns), True, delta) for _ in range(3))
    out = recur(kernels, whole)
    divided = torch.cat([recur(kernels, pieces, slice(cut)), recur(kernels, pieces, slice(cut, None))])
    assert torch.equal(out, divided) and torch.equal(whole[0], pieces[0])
    if columns > 1:
        pair = [seed % columns, (seed + 1) % columns]  # beside another, so that both ways are by columns
        alone[0], alone[3] = alone[0][..., pair].contiguous(), alone[3][..., pair].contiguous()
        assert torch.equal(out[..., pair], recur(kernels, alone))
