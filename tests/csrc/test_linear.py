"""Products with every kind of weight against float64, and what they promise beyond being right."""

from types import ModuleType

import gguf
import numpy as np
import pytest
import torch
from effort import draws
from gguf.quants import dequantize
from gguf.quants import quantize as quantize_gguf
from gguf_models import random_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_worker.models.checkpoint.mxfp4 import as_blocks

PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
SUPERBLOCKS = {"q3_k": "Q3_K", "q4_k": "Q4_K", "q5_k": "Q5_K", "q6_k": "Q6_K", "iq4_xs": "IQ4_XS"}  # of 256 columns
RANDOM = {"iq4_nl": "IQ4_NL"} | SUPERBLOCKS  # types that the gguf package decodes, and does not make
# Packed, with inputs in digits. GGUF has no zeros: q4_zeros has its numbers as Q4_1 has them.
DIGITS = {"q8": "Q8_0", "q4": "Q4_0", "q4_mins": "Q4_1", "q4_zeros": "Q4_1", "mxfp4": "MXFP4"}
DIGITS |= {"q5": "Q5_0", "q5_mins": "Q5_1"} | RANDOM | {"q8_rows": "Q8_0"}  # no type of GGUF, and about as large
PACKED = (*DIGITS, "halves")
FORMATS = (*PLAIN, *PACKED)
BITS = {"15 bits": 127 * 128, "8 bits": 127}  # the largest number of a block of inputs
MOST = BITS | {f"{bits} a token": most for bits, most in BITS.items()}  # and of all inputs of a token
each_format = pytest.mark.parametrize("format_", FORMATS)
fuzz = settings(max_examples=draws(5, 50), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def inputs_of(format_: str) -> list[str]:
    """What inputs may be rounded to."""
    if format_ in PLAIN:
        return ["float32"]
    if format_ == "halves":
        return ["float32", "bfloat16"]
    return ["float32", *(f"{bits} a token" if format_ == "q8_rows" else bits for bits in BITS)]


def columns_of(format_: str) -> int:
    return 256 if format_ in SUPERBLOCKS else 32


def make(kernels, format_: str, rows: int, cols: int, inputs: str = ""):
    """A weight of the extension, and its values in float64 by the gguf package."""
    values = torch.randn(rows, cols)
    if format_ in PLAIN:
        data = values.to(PLAIN[format_])
        return kernels.Weight(data, format_, rows, cols, inputs), data.double()
    data = torch.empty(kernels.packed_bytes(format_, rows, cols), dtype=torch.uint8)
    if format_ == "halves":
        kernels.pack(data, values.bfloat16())
        return kernels.Weight(data, format_, rows, cols, inputs), values.bfloat16().double()
    if format_ == "q8_rows":
        codes, scales = (values * 40).round().clamp(-128, 127), torch.rand(rows, 1)
        stored = torch.cat((scales.view(torch.uint8), codes.to(torch.int8).view(torch.uint8)), dim=1)
        kernels.repack(data, stored, format_, rows, cols)
        return kernels.Weight(data, format_, rows, cols, inputs), codes.double() * scales.double()
    kind = gguf.GGMLQuantizationType[DIGITS[format_]]
    seed = int(torch.randint(2**31, ()))
    raw = random_rows(kind.name, rows, cols, seed) if format_ in RANDOM else quantize_gguf(values.numpy(), kind)
    decoded = torch.from_numpy(dequantize(raw, kind).reshape(rows, cols).copy()).double()
    if format_ == "q4_zeros":
        raw, decoded = with_zeros(raw, decoded)
    if format_ == "mxfp4":
        blocks = torch.from_numpy(raw.reshape(rows, -1, 17).copy())
        raw = as_blocks(blocks[..., 1:], blocks[..., 0], paired=False).numpy()
    kernels.repack(data, torch.from_numpy(raw.copy()), format_, rows, cols)
    return kernels.Weight(data, format_, rows, cols, inputs), decoded


def with_zeros(raw: np.ndarray, decoded: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    """Blocks of Q4_1 with whole zeros in place of their minimums, and what they mean then."""
    blocks = raw.reshape(len(raw), -1, 20).copy()
    scales, minimums = np.split(blocks[:, :, :4].copy().view(np.float16).astype(np.float64), 2, axis=2)
    zeros = np.random.default_rng(len(raw)).integers(0, 16, minimums.shape)
    blocks[:, :, 2:4] = zeros.astype(np.float16).view(np.uint8)
    values = decoded.numpy().reshape(*blocks.shape[:2], 32)
    numbers = np.rint((values - minimums) / np.where(scales == 0, 1, scales))
    meant = ((numbers - zeros) * scales).reshape(decoded.shape)
    return blocks.reshape(len(raw), -1), torch.from_numpy(meant)


def seen(x: torch.Tensor, inputs: str) -> torch.Tensor:
    """Inputs as kernels see them."""
    if inputs == "float32":
        return x.double()
    return x.bfloat16().double() if inputs == "bfloat16" else rounded(x, inputs)


def rounded(x: torch.Tensor, inputs: str) -> torch.Tensor:
    """Inputs in digits: per 32 or per token, in `most` steps up to the largest, either way."""
    blocks, most = x.view(x.shape[0], -1, x.shape[1] if "token" in inputs else 32), MOST[inputs]
    top = blocks.abs().amax(-1, keepdim=True).clamp(min=most * torch.finfo(torch.float32).tiny)
    by = torch.tensor(float(most)) / top  # `most / top` multiplies with a rounded 1 / top
    return ((blocks * by).round().double() * (top / most).double()).view(x.shape)


def product(kernels, x: torch.Tensor, weight, bias=None) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.rows), float("nan"))
    kernels.linear(out, x, weight, bias)
    return out


@pytest.mark.scaled
@each_format
@fuzz
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 70), columns=st.integers(1, 35), blocks=st.integers(1, 5))
def test_it_is_the_product(kernels, format_, seed, rows, columns, blocks):
    torch.manual_seed(seed)
    inputs = inputs_of(format_)[(seed >> 1) % len(inputs_of(format_))]
    cols = blocks * columns_of(format_) if format_ in PACKED else blocks * 32 - seed % 31
    weight, values = make(kernels, format_, rows, cols, inputs)
    x = torch.randn(columns, cols) * torch.rand(cols).pow(4) * 10  # some inputs much larger than others
    bias = torch.randn(rows) if seed % 2 else None
    expected = seen(x, inputs) @ values.T + (0 if bias is None else bias.double())
    scale = float((x.double().abs() @ values.abs().T).max()) + 1
    assert float((product(kernels, x, weight, bias) - expected).abs().max()) < 2e-6 * scale


@each_format
def test_a_column_does_not_depend_on_those_beside_it(kernels, format_):
    """Nor on the number of threads, nor where a row ends within a register: what a sequence says is the same in any
    batch, bit for bit."""
    torch.manual_seed(1)
    cols = max(3 * columns_of(format_), 9 * 32)  # AVX2 spreads eight blocks at a time, for up to 48 columns
    most = 53 if isinstance(kernels, ModuleType) else 5  # the definition is slow, and has columns one by one
    forms = [(75, cols, most, inputs) for inputs in inputs_of(format_)]
    forms += [(29, cols, min(most, 20), "float32") for cols in range(33, 41)] if format_ in PLAIN else []
    if format_ in PLAIN and most > 5:  # slabs; chunks of k, and slabs within a turn, on AVX-512
        forms += [(21, 1203, 120, "float32"), (21, 2803, 60, "float32")]
    if format_ == "q8_rows":  # sums of 1024 columns are whole
        forms += [(75, 2080, most, inputs) for inputs in inputs_of(format_)[1:]]
    if format_ == "halves" and most > 5:  # tiles take long rows in chunks, and many columns in slabs
        forms += [(75, 640, 270, "bfloat16"), (300, 2112, 250, "bfloat16")]
    try:
        for rows, cols, columns, inputs in forms:
            weight, _ = make(kernels, format_, rows, cols, inputs)
            x = torch.randn(columns, cols)
            together = product(kernels, x, weight)
            for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 32, 33, 49):
                if count < columns:
                    kernels.set_threads(1 + count % 3)
                    alone = product(kernels, x[:count].contiguous(), weight)
                    assert torch.equal(alone, together[:count]), (inputs, cols, count)
    finally:
        kernels.set_threads(0)


@pytest.mark.parametrize(("format_", "inputs"), [(each, inputs) for each in DIGITS for inputs in inputs_of(each)[1:]])
def test_the_largest_and_the_smallest_digits(kernels, format_, inputs):
    """The largest have room in sums. Of inputs so small that their steps have no inverse, a block's step is the
    smallest normal number; nothing becomes infinite or NaN."""
    torch.manual_seed(2)
    cols, rows = 2 * columns_of(format_), 805  # several groups of rows for each turn of a thread
    weight, values = make(kernels, format_, rows, cols, inputs)
    x = torch.tensor([[1.0], [-1.0], [1.0]]).expand(3, cols).contiguous()
    error = product(kernels, x, weight) - x.double() @ values.T
    assert float(error.abs().max()) < 1e-6 * float(values.abs().sum(1).max())
    weight, values = make(kernels, format_, 20, cols, inputs)
    for size in (1e-36, 1e-37, 1e-38, 1e-40, 1e-45):
        x = torch.randn(3, cols) * size
        x[1, 32:64] = torch.randn(32)
        x[2, 5] = 1.0
        error = product(kernels, x, weight).double() - rounded(x, inputs) @ values.T
        assert float(error[0].abs().max()) < 1e-6 * size + 1e-37, size
        assert float(error[1:].abs().max()) < 1e-4, size


@each_format
def test_rows_are_decoded_to_the_bit(kernels, format_):
    cols = 2 * columns_of(format_)
    weight, values = make(kernels, format_, 37, cols)
    rows, out = torch.tensor([36, 0, 7, 8, 36]), torch.empty(5, cols)
    kernels.weight_rows(out, weight, rows)
    assert torch.equal(out, values[rows].float())


@pytest.mark.parametrize("format_", ["q8", "q4"])
def test_rounding_is_that_of_gguf(kernels, format_):
    values = torch.randn(19, 96) * torch.tensor([1e-3, 1.0, 50.0]).repeat_interleave(32)
    values[3, 32:64] = 0
    data, out = torch.empty(kernels.packed_bytes(format_, 19, 96), dtype=torch.uint8), torch.empty(19, 96)
    kernels.quantize(data, values, format_)
    kernels.weight_rows(out, kernels.Weight(data, format_, 19, 96), torch.arange(19))
    kind = gguf.GGMLQuantizationType[DIGITS[format_]]
    expected = dequantize(quantize_gguf(values.numpy(), kind), kind)
    assert (out.numpy() != expected).mean() < 0.01, "but for ties"
    np.testing.assert_allclose(out.numpy(), expected, atol=float(values.abs().max()) / (100 if format_ == "q8" else 7))


@pytest.mark.parametrize("format_", ["f32", *PACKED])
def test_what_is_not_finite_shows_in_its_column_only(kernels, format_):
    cols = 2 * columns_of(format_)
    for inputs in inputs_of(format_):
        weight, _ = make(kernels, format_, 24, cols, inputs)
        x = torch.randn(3, cols)
        good = product(kernels, x, weight)
        for bad in (float("nan"), float("inf")):
            x[1, 40] = bad
            out = product(kernels, x, weight)
            assert not out[1].isfinite().any(), (inputs, bad)
            assert torch.equal(out[[0, 2]], good[[0, 2]]), (inputs, bad)


@pytest.mark.parametrize(
    ("inputs", "sign"), [(inputs, sign) for inputs in inputs_of("q8_rows")[1:] for sign in (1, -1)]
)
def test_sums_of_rows_with_one_scale_have_room(kernels, inputs, sign):
    """For the largest numbers, in any number of columns; and inputs of other sizes see the same step."""
    rows, cols = 37, 2 * 1024 + 96
    data = torch.empty(kernels.packed_bytes("q8_rows", rows, cols), dtype=torch.uint8)
    scales = torch.full((rows, 1), 0.5).view(torch.uint8)
    kernels.repack(
        data, torch.cat((scales, torch.full((rows, cols), 0x80, dtype=torch.uint8)), 1), "q8_rows", rows, cols
    )
    weight = kernels.Weight(data, "q8_rows", rows, cols, inputs)
    for columns in (1, 2, 3, 8, 12, 17):
        out = product(kernels, torch.full((columns, cols), float(sign) * MOST[inputs]), weight)
        assert torch.equal(out.double(), torch.full_like(out, sign * -64.0 * MOST[inputs] * cols).double())
    x = torch.full((1, cols), 0.4 / MOST[inputs])
    x[0, 7] = 1.0
    assert torch.allclose(product(kernels, x, weight), torch.full((1, rows), -64.0)), "all but one are rounded to zero"


@pytest.mark.parametrize(("format_", "inputs"), [(each, inputs) for each in DIGITS for inputs in inputs_of(each)[1:]])
def test_all_that_fuse_compute_the_same_bits(extension, format_, inputs):
    """One column, several, too few for tiles, just enough, and more than one tile has. Where a row has one scale,
    nothing is fused, and all compute the same."""
    some = format_ == "q8_rows"
    fusing = [isa for isa in extension.isas() if some or isa not in ("emulated", "generic")]
    torch.manual_seed(3)
    cols, best = 1056 if some else 3 * columns_of(format_), extension.isa()
    weight, _ = make(extension, format_, 75, cols, inputs)
    x = torch.randn(17, cols) * torch.rand(cols).pow(4) * 10
    try:
        for count in (1, 3, 8, 11, 12, 17):
            found = {}
            for isa in fusing:
                extension.select_isa(isa)
                found[isa] = product(extension, x[:count].contiguous(), weight)
            assert all(torch.equal(out, found[fusing[0]]) for out in found.values()), count
    finally:
        extension.select_isa(best)


@pytest.mark.parametrize("format_", DIGITS)
def test_packed_rows_take_hardly_more_than_the_file_does(extension, format_):
    stored = random_rows(DIGITS[format_], 48, 512)
    # MXFP4 has a byte for what is a float16 here, and Q3_K 6 bits for what is a byte.
    most = 1.06 if format_ in ("mxfp4", "q3_k") else 1.03
    assert extension.packed_bytes(format_, 48, 512) <= most * stored.nbytes


@fuzz
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 20))
def test_any_bytes_are_decoded_as_by_the_definition(extension, seed, rows):
    """Infinite and NaN scales as well."""
    torch.manual_seed(seed)
    for format_ in DIGITS:
        data = torch.randint(0, 256, (extension.packed_bytes(format_, rows, 512),), dtype=torch.uint8)
        weight, out = extension.Weight(data, format_, rows, 512), torch.empty(2, rows, 512)
        extension.weight_rows(out[0], weight, torch.arange(rows))
        extension.ref.weight_rows(out[1], weight, torch.arange(rows))
        torch.testing.assert_close(out[0], out[1], rtol=3e-7, atol=3e-45, equal_nan=True)
