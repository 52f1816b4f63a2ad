"""Products of inputs and matrices: right, and the same bits for a token whoever else is there."""

from dataclasses import replace
from typing import Any

import _C_cuda_simt as native
import numpy as np
from arrays import BF16, F16, F32, TOLERANCE, Array, close
from simulator_cases import told

FEW, SOME, MANY = 16, 64, 190  # tokens for tiles of each width; the last are enough for several of the widest


def product(x: Array, weight: Array, bias: Array | None) -> Array:
    out = Array.of(np.full((x.data.shape[0], weight.data.shape[0]), np.nan), x.dtype)
    native.linear(out.ref, x.ref, weight.ref, None if bias is None else bias.ref, 0)
    return out


def padded(rng: Any, rows: int, columns: int, dtype: int, gap: int) -> Array:
    """Numbers in rows with NaN between them."""
    whole = Array.of(np.full((rows, columns + gap), np.nan), dtype)
    whole.data[:, :columns] = Array.of(rng.normal(0, 1, (rows, columns)), dtype).data
    return Array(whole.data[:, :columns], dtype)


def linear_case(rng: Any) -> None:
    dtype = int(rng.choice([F32, F16, BF16]))
    tokens = int(rng.choice([1, 2, 15, FEW, FEW + 1, 40, SOME]))
    rows, columns = int(rng.choice([1, 2, 7, 16, 33, 70])), int(rng.choice([1, 8, 24, 63, 64, 72, 200]))
    gap = int(rng.choice([0, 8, 3 if columns % 8 else 16]))
    x, weight = padded(rng, tokens, columns, dtype, gap), padded(rng, rows, columns, dtype, gap)
    bias = Array.of(rng.normal(0, 1, rows), dtype) if rng.integers(2) else None
    got = product(x, weight, bias)
    want = x.values() @ weight.values().T + (0 if bias is None else bias.values())
    what = f"linear {dtype=} {tokens=} {rows=} {columns=} {gap=}"
    close(got.values(), want, TOLERANCE[dtype], what)
    some = rng.permutation(tokens)[: int(rng.integers(1, tokens + 1))]
    alone = product(Array(np.ascontiguousarray(x.data[some]), dtype), weight, bias)
    assert (alone.data == got.data[some]).all(), what


def wide_linear_case(rng: Any) -> None:
    """Enough for the widest tiles, more of them than thread blocks: the bits are those of a token alone."""
    dtype = int(rng.choice([F16, BF16]))
    tokens, rows, columns = MANY + int(rng.integers(9)), 130 + int(rng.integers(300)), int(rng.choice([8, 136, 256]))
    if columns == 8:
        tokens += 2048  # for which all weights are read first
    x, weight = padded(rng, tokens, columns, dtype, 0), padded(rng, rows, columns, dtype, 8)
    got = product(x, weight, None)
    what = f"linear {dtype=} {tokens=} {rows=} {columns=}"
    close(got.values(), x.values() @ weight.values().T, TOLERANCE[dtype], what)
    for count in (1, FEW, SOME):
        some = rng.permutation(tokens)[:count]
        alone = product(Array(np.ascontiguousarray(x.data[some]), dtype), weight, None)
        assert (alone.data == got.data[some]).all(), f"{what} {count=}"


def linear_op_case(rng: Any) -> None:
    """As the worker calls it: rows that do not lie side by side or begin at odd places, in any number of dimensions."""
    import torch

    from gpu_worker.ops.native_cuda import NativeCudaOps

    torch.set_num_threads(1)
    ops = NativeCudaOps(native, torch.device("cpu"), batch_invariant=True)
    dtype = [torch.float32, torch.bfloat16, torch.float16][int(rng.integers(3))]
    columns = int(rng.choice([24, 20, 7]))
    torch.manual_seed(int(rng.integers(1 << 30)))
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((12, columns), (30, columns), (30,)))
    together = ops.linear(x, weight, bias)
    assert torch.equal(ops.logits(x, weight, bias), together)
    assert torch.allclose(together, torch.nn.functional.linear(x, weight, bias), rtol=2e-2, atol=2e-2)
    apart = torch.randn(12, columns + 3).to(dtype)
    apart[:, 3:] = x
    for each, other in ((x.view(3, 4, columns), weight), (apart[:, 3:], weight), (x, weight.t().contiguous().t())):
        assert torch.equal(ops.linear(each, other, bias).reshape(12, 30), together), (dtype, columns)
    for first, last in ((0, 1), (3, 9), (11, 12)):
        assert torch.equal(ops.linear(x[first:last], weight, bias), together[first:last]), (dtype, columns)
    assert ops.linear(x[:0], weight, None).shape == (0, 30)
    assert ops.linear(x.double(), weight.double()).dtype == torch.float64


def asks_once_case(rng: Any) -> None:
    """What a kernel may have of shared memory is asked once for each device; a question that failed, again.

    It is the first to launch this kernel in its process.
    """
    x, weight = (Array.of(rng.normal(0, 1, (200, 8)), F16) for _ in range(2))  # enough for the widest tiles
    runtime, want = native.runtime, None
    for device in (0, 2, 0, 1, 2, 1):
        runtime.choose_device(device)
        runtime.take_calls()
        if device not in ASKED:
            runtime.fail_after(0)
            assert told(lambda: product(x, weight, None)) == "shared memory: out of memory"
            assert runtime.take_calls() == "a"
        for _ in range(2):
            got = product(x, weight, None)
            want = got if want is None else want
            assert (got.data == want.data).all(), device
        assert runtime.take_calls() == ("KK" if device in ASKED else "aKK"), device
        ASKED.add(device)


ASKED: set[int] = set()  # devices, by any case of this process


def packed_case(rng: Any) -> None:
    """A product with a matrix in 4 or 8 bits has the bits of the product with the decoded matrix, in any company."""
    import torch

    from gpu_worker.ops.cuda_weights import pack_e4m3, pack_nibbles

    torch.manual_seed(int(rng.integers(1 << 30)))
    dtype = [torch.float16, torch.bfloat16][int(rng.integers(2))]
    rows, columns = int(rng.choice([1, 7, 16, 33, 70, 300])), int(rng.choice([32, 64, 96, 200]))
    tokens = int(rng.choice([1, 5, FEW, FEW + 1, SOME])) if rows < 300 else MANY
    kind = str(rng.choice(["q4", "q4_mins", "e4m3"]))
    if kind == "e4m3":
        numbers = (torch.randn(rows, columns) * 50).to(torch.float8_e4m3fn)
        scales = torch.rand(rows, -(-columns // 64)) * 0.01
        matrix = pack_e4m3(numbers, scales)
        values = numbers.float() * scales.repeat_interleave(64, 1)[:, :columns]
    else:
        columns = columns // 32 * 32
        numbers = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
        scales, minimums = (torch.rand(2, rows, columns // 32) * 0.1 - 0.02).half()
        matrix = pack_nibbles(numbers, scales, minimums if kind == "q4_mins" else None)
        wide = scales.float().repeat_interleave(32, 1)
        values = numbers * wide + minimums.float().repeat_interleave(32, 1) if kind != "q4" else (numbers - 8.0) * wide
    assert matrix.format == kind and (matrix.rows, matrix.columns) == (rows, columns)
    x, bias = torch.randn(tokens, columns).to(dtype), torch.randn(rows).to(dtype)
    decoded, want, got = values.to(dtype), *(torch.full((tokens, rows), torch.nan, dtype=dtype) for _ in range(2))
    native.linear(torch_ref(want), torch_ref(x), torch_ref(decoded), torch_ref(bias), 0)
    native.linear_packed(torch_ref(got), torch_ref(x), torch_ref(matrix.data), kind, torch_ref(bias), 0)
    assert torch.equal(got, want), f"{kind} {dtype=} {tokens=} {rows=} {columns=}"


def fp8_case(rng: Any) -> None:
    """Inputs are rounded as torch rounds them, to the byte; products (linear_fp8, as the worker calls it) are near
    float64's of the rounded numbers, and have the same bits in any company."""
    import torch

    from gpu_worker.ops.cuda_weights import InputRounding, pack_e4m3
    from gpu_worker.ops.native_cuda import NativeCudaOps

    torch.manual_seed(int(rng.integers(1 << 30)))
    dtype = [torch.float16, torch.bfloat16][int(rng.integers(2))]
    rows, columns = int(rng.choice([1, 7, 16, 33, 70, 300])), int(rng.choice([8, 64, 72, 200, 640]))
    tokens = int(rng.choice([1, 5, FEW, FEW + 1, SOME])) if rows < 300 else MANY
    inputs = [InputRounding(), InputRounding(columns=64), InputRounding(columns=128), InputRounding(scale=0.004)]
    how = inputs[int(rng.integers(4))]
    what = f"fp8 {dtype=} {tokens=} {rows=} {columns=} {how=}"
    x = (torch.randn(tokens, columns + 8) * 10.0 ** torch.randint(-3, 3, (tokens, 1))).to(dtype)[:, :columns]
    x[0], bias = 0, torch.randn(rows).to(dtype)
    numbers = (torch.randn(rows, columns) * 50).to(torch.float8_e4m3fn)
    scales = torch.rand(rows, -(-columns // 64)) * 0.01
    codes, factors = by_torch(x, how.columns or 64 * scales.shape[1], how.scale)
    rounded = torch.full((tokens, 80 * scales.shape[1]), 99, dtype=torch.uint8)
    native.round_inputs(torch_ref(rounded), torch_ref(x), how.columns, how.scale, 0)
    found, stored, rest = rounded.view(tokens, -1, 80).split([64, 4, 12], -1)
    found = found.reshape(tokens, -1, 4, 2, 2).transpose(2, 3).reshape(tokens, -1)  # in the order of columns
    assert torch.equal(found, codes) and not rest.any(), what
    assert torch.equal(stored.contiguous().view(torch.float32)[..., 0], factors), what
    is_simulated = hasattr(native, "runtime")  # whatever device it is, it multiplies; and its sums have all bits
    if not (is_simulated or native.multiplies_fp8(0)):
        return
    ops, matrix = NativeCudaOps(native, torch.device("cpu")), replace(pack_e4m3(numbers, scales), inputs=how)
    together = ops.linear(x, matrix, bias)
    left, right = (
        codes.double() * each.double().repeat_interleave(64, 1)[:, :columns]
        for codes, each in ((codes.view(torch.float8_e4m3fn)[:, :columns], factors), (numbers, scales))
    )
    want, size = left @ right.T + bias.double(), left.abs() @ right.abs().T + bias.double().abs()
    room = want.abs() * torch.finfo(dtype).eps + size * (2e-6 if is_simulated else 2**-12) + 1e-7
    assert bool(((together.double() - want).abs() <= room).all()), what
    some = torch.from_numpy(rng.permutation(tokens)[: int(rng.integers(1, tokens + 1))])
    assert torch.equal(ops.linear(x[some], matrix, bias), together[some]), what
    x[-1, int(rng.integers(columns))] = torch.nan
    spoilt = ops.linear(x, matrix, bias)
    assert bool(spoilt[-1].isnan().all()) and torch.equal(spoilt[:-1], together[:-1]), what


def by_torch(x: Any, group: int, scale: float) -> tuple[Any, Any]:
    """Codes in the order of columns, and the scale of each 64; columns that are not there are zeros."""
    import torch

    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % group))
    groups = padded.view(len(x), -1, group)
    least = torch.finfo(torch.float32).tiny
    scales = (groups.abs().amax(-1) / 448).clamp(min=least) if scale == 0 else torch.full(groups.shape[:2], scale)
    codes = (groups / scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    chunks = -(-x.shape[1] // 64)
    return codes.view(len(x), -1)[:, : 64 * chunks], scales.repeat_interleave(group // 64, 1)[:, :chunks]


def torch_ref(tensor: Any) -> Any:
    from gpu_worker.ops.native_cuda import ref

    return ref(tensor)
