"""Norms, activations and rotation against float64, of sizes that fill no register; rounding to 16 bits."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

fuzz = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
DTYPES = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
each_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = DTYPES[result.dtype]
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@each_type
@fuzz
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(0, 9), columns=st.integers(1, 150))
def test_rows(kernels, dtype, seed, rows, columns):
    torch.manual_seed(seed)
    x = (3 * torch.randn(rows, 2 * columns)).to(dtype)
    wide, weight = x.double(), torch.randn(2 * columns)
    out, half = torch.empty_like(x), torch.empty(rows, columns, dtype=dtype)
    kernels.rms_norm(out, x, weight, 1e-5)
    close(out, wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())
    kernels.silu_and_mul(half, x)
    close(half, silu(wide[:, :columns]) * wide[:, columns:])


def test_they_work_in_place_and_beside_neighbours(either):
    x, weight = torch.randn(3, 16), torch.ones(8)
    norms, gated = torch.empty(3, 8), torch.empty(3, 4)
    either.rms_norm(norms, x[:, 8:], weight, 1e-5)
    either.silu_and_mul(gated, x[:, 8:])
    for op, more, wanted, width in ((either.rms_norm, (weight, 1e-5), norms, 8), (either.silu_and_mul, (), gated, 4)):
        for place in (0, 8):  # of the columns beside, and in their own place
            both = x.clone()
            op(both[:, place : place + width], both[:, 8:], *more)
            assert torch.equal(both[:, place : place + width], wanted)


def test_activations_of_huge_numbers(kernels):
    """A gate that is shut stays shut, however far; what is no number shows."""
    gate = torch.tensor([[-3e38, -1e30, -100.0, -88.5, -88.0, 88.5, 3e38, 0.0]])
    for shape in ((1, 8), (8, 1)):  # by eights, and what is left
        out = torch.empty(shape)
        kernels.silu_and_mul(out, torch.stack((gate.view(shape), torch.ones(shape)), 1).flatten(1))
        torch.testing.assert_close(out.view(1, 8), silu(gate.double()).float(), rtol=1e-5, atol=1e-35)
    kernels.silu_and_mul(out := torch.empty(1, 2), torch.tensor([[torch.nan, -torch.inf, 1.0, 1.0]]))
    assert out.isnan().all()


@each_type
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(kernels, dtype, interleaved):
    torch.manual_seed(0)
    positions, pair = torch.tensor([3, 0, 8, 8, 1]), -1 if interleaved else -2
    for dim, rotated in ((64, 64), (64, 32), (80, 20), (24, 6)):
        whole = torch.randn(5, 7, dim + 8).to(dtype)
        heads, before = whole[:, 1:4, :dim], whole.clone()  # neither dense nor from the start
        angles = torch.arange(9)[:, None] * 0.37 ** torch.arange(rotated // 2)
        pairs = heads[..., :rotated].double().unflatten(-1, (-1, 2) if interleaved else (2, -1))
        turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[positions][:, None]
        turned = torch.complex(*pairs.unbind(pair)) * turn
        turned = torch.stack((turned.real, turned.imag), dim=pair).flatten(-2)
        wanted = torch.cat((turned, heads[..., rotated:].double()), dim=-1)
        cos, sin = torch.cat((angles.cos(), angles.cos()), dim=1), angles.sin()
        kernels.rotary(heads, positions, cos, sin, rotated, interleaved)
        close(heads, wanted)
        whole[:, 1:4, :dim] = before[:, 1:4, :dim]
        assert torch.equal(whole, before)
        again = heads.clone()
        kernels.rotary(heads, positions, cos, sin, rotated, interleaved)
        kernels.rotary(again, None, cos[positions], sin[positions], rotated, interleaved)
        assert torch.equal(again, heads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_to_16_bits_is_to_nearest_even(kernels, dtype):
    """All bit patterns of float16 there and back, and the middles between neighbours; also subnormals and infinity."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    patterns = patterns[patterns.isfinite()].sort().values
    middles = (patterns[:-1].double() + patterns[1:].double()).mul(0.5).float()
    values = torch.cat((patterns.float(), middles, middles.nextafter(torch.tensor(9e38)), torch.tensor([1e39, -1e39])))
    rows = values[: len(values) // 8 * 8].view(-1, 1, 8)
    pages = torch.empty(-(-len(rows) // 16), 1, 2, 16, 8)
    rounded, back, slots = pages.to(dtype), pages.clone(), torch.arange(len(rows))

    def stored(cache, given):
        kernels.cache_write(cache, given, given, slots)
        return cache[:, 0].transpose(0, 1).reshape(2, -1, 8)[:, : len(rows)]

    wanted = rows[:, 0].to(dtype)
    assert all(torch.equal(side, wanted) for side in stored(rounded, rows))
    assert all(torch.equal(side, wanted.float()) for side in stored(back, rows.to(dtype)))
