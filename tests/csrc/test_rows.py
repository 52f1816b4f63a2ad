"""Norms, activations, rotation, argmax and merging against float64, of sizes that fill no register."""

import math

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

    out = torch.randn(rows, 2 * columns).to(dtype)
    more, total = out.clone(), x.clone()
    kernels.fused_add_rms_norm(out, total, weight, 1e-5)
    close(total, wide + more.double())
    wide_total = total.double()
    norm = wide_total / (wide_total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(out.double(), norm, rtol=2 * DTYPES[dtype], atol=2 * DTYPES[dtype])

    gate, up = wide[:, :columns], wide[:, columns:]
    half = torch.empty(rows, columns, dtype=dtype)
    kernels.silu_and_mul(half, x)
    close(half, torch.nn.functional.silu(gate) * up)
    kernels.gelu_and_mul(half, x)
    close(half, torch.nn.functional.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "rotated"), [(64, 64), (64, 32), (80, 20), (24, 6)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(kernels, dtype, dim, rotated, interleaved):
    torch.manual_seed(0)
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


@fuzz
@given(seed=st.integers(0, 2**32 - 1), columns=st.integers(1, 70))
def test_argmax_is_the_first_highest(kernels, seed, columns):
    torch.manual_seed(seed)
    x = torch.randint(-2, 3, (9, columns)).float()
    x[1] = -torch.inf
    x[2, seed % columns] = torch.nan
    x[3, seed % columns] = torch.inf
    ids = torch.empty(9, dtype=torch.int64)
    kernels.argmax(ids, x)
    assert ids.tolist() == x.numpy().argmax(1).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_merge_to_the_whole(kernels, dtype):
    torch.manual_seed(0)
    scores, values = torch.randn(3, 2, 4, 20) * 5, torch.randn(20, 24)
    split = [scores[..., :7], scores[..., 7:8], scores[..., 8:8], scores[..., 8:]]
    of = [values[:7], values[7:8], values[8:8], values[8:]]
    for parts in (range(4), [2, 0, 1, 3]):
        chosen = [split[i].softmax(-1) @ of[i] if split[i].shape[-1] else torch.full((3, 2, 4, 24), 7.0) for i in parts]
        lses = torch.stack([split[i].logsumexp(-1) for i in parts]) / math.log(2)
        out, lse = torch.empty(6, 4, 24, dtype=dtype), torch.empty(6, 4)
        stacked = torch.stack(chosen).reshape(4, 6, 4, 24).to(dtype)
        kernels.merge_states(out, lse, stacked, lses.reshape(4, 6, 4))
        whole = scores.double().softmax(-1) @ values.double()
        tolerance = max(2 * DTYPES[dtype], 1e-5)
        torch.testing.assert_close(out.double(), whole.reshape(6, 4, 24), rtol=tolerance, atol=tolerance)
        total = scores.double().logsumexp(-1).reshape(6, 4) / math.log(2)
        torch.testing.assert_close(lse.double(), total, rtol=1e-5, atol=1e-5)
        kernels.merge_states(out, lse, stacked, torch.full((4, 6, 4), -torch.inf))
        assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_to_16_bits_is_to_nearest_even(kernels, dtype):
    """All bit patterns of float16 there and back, and the middles between neighbours; also subnormals and infinity."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    patterns = patterns[patterns.isfinite()].sort().values
    middles = (patterns[:-1].double() + patterns[1:].double()).mul(0.5).float()
    values = torch.cat((patterns.float(), middles, middles.nextafter(torch.tensor(9e38)), torch.tensor([1e39, -1e39])))
    values = values[: len(values) // 8 * 8].view(1, 1, 1, -1, 8).repeat(1, 1, 2, 1, 1)
    out = torch.empty_like(values, dtype=dtype)
    kernels.convert_layout(out, values)
    assert torch.equal(out, values.to(dtype))
    back = torch.empty_like(values)
    kernels.convert_layout(back, out)
    assert torch.equal(back, out.float())
