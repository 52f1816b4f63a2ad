"""Norms, activations and rotation against float64, of sizes that fill no register; rounding to 16 bits."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

fuzz = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
DTYPES = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = DTYPES[result.dtype]
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@fuzz
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(0, 9), columns=st.integers(1, 150))
def test_rows(kernels, dtype, seed, rows, columns):
    torch.manual_seed(seed)
    x = (3 * torch.randn(rows, 2 * columns)).to(dtype)
    wide, weight = x.double(), torch.randn(2 * columns)
    norm = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = torch.empty_like(x)
    kernels.rms_norm(out, x, weight, 1e-5)
    close(out, norm)

    gate, up = wide[:, :columns], wide[:, columns:]
    half = torch.empty(rows, columns, dtype=dtype)
    kernels.silu_and_mul(half, x)
    close(half, torch.nn.functional.silu(gate) * up)


def test_activations_of_huge_numbers(kernels):
    """A gate that is shut stays shut, however far; what is no number shows."""
    gate = torch.tensor([[-3e38, -1e30, -100.0, -88.5, -88.0, 88.5, 3e38, 0.0]])
    for shape in ((1, 8), (8, 1)):  # by eights, and what is left
        out = torch.empty(shape)
        kernels.silu_and_mul(out, torch.stack((gate.view(shape), torch.ones(shape)), 1).flatten(1))
        expected = torch.nn.functional.silu(gate.double()).float()
        torch.testing.assert_close(out.view(1, 8), expected, rtol=1e-5, atol=1e-35)
    lost = torch.tensor([[float("nan"), -float("inf"), 1.0, 1.0]])
    kernels.silu_and_mul(out := torch.empty(1, 2), lost)
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary(kernels, dtype):
    torch.manual_seed(0)
    for dim, rotated in ((64, 64), (64, 32), (80, 20), (24, 6)):
        for interleaved in (False, True):
            rotate(kernels, dtype, dim, rotated, interleaved)


def rotate(kernels, dtype, dim, rotated, interleaved):
    whole = torch.randn(5, 7, dim + 8).to(dtype)
    heads, before = whole[:, 1:4, :dim], whole.clone()  # neither dense nor from the start
    angles = torch.arange(9)[:, None] * 0.37 ** torch.arange(rotated // 2)
    positions = torch.tensor([3, 0, 8, 8, 1])
    pairs = heads[..., :rotated].double().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    first, second = pairs.unbind(-1 if interleaved else -2)
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[positions][:, None]
    turned = torch.complex(first, second) * turn
    turned = torch.stack((turned.real, turned.imag), dim=-1 if interleaved else -2).flatten(-2)
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
    slots = torch.arange(len(rows))
    pages = torch.empty(-(-len(rows) // 16), 1, 2, 16, 8)
    rounded, back = pages.to(dtype), pages.clone()
    kernels.cache_write(rounded, rows, rows, slots)
    stored = rounded[:, 0].transpose(0, 1).reshape(2, -1, 8)[:, : len(rows)]
    assert all(torch.equal(side, rows[:, 0].to(dtype)) for side in stored)
    kernels.cache_write(back, rows.to(dtype), rows.to(dtype), slots)
    read = back[:, 0].transpose(0, 1).reshape(2, -1, 8)[:, : len(rows)]
    assert torch.equal(read, stored.float())
