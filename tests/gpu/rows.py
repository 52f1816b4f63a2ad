"""Ops on rows: norms and activations; and from logits to tokens. Against copying, and torch."""

import torch
from bandwidth import copy_bandwidth
from target import Target, target
from timing import Call, Case, report, sets
from torch import Tensor
from torch.nn import functional

from gpu_worker.ops.cuda_weights import COLUMNS, FP8_BYTES, CudaMatrix, pack_e4m3, pack_nibbles
from gpu_worker.ops.native_cuda import ref
from gpu_worker.sampling.filters import columns_of
from octavo.request.sampling import SamplingParams

TOP_K, TOP_P, NUM_TOP = 50, 0.9, 5


def hidden(t: Target, count: int) -> tuple[int, list[Case]]:
    """Rows of 4096 (8192 before activations) in bfloat16."""
    width = t.pick(4096, 64)
    num_sets = t.pick(sets(count * width * 4), 1)
    wide = torch.randn(num_sets, count, 2 * width, device=t.device).to(torch.bfloat16)
    x = wide[:, :, :width].contiguous()
    out, total, weight = torch.empty_like(x[0]), x.clone(), torch.ones_like(x[0, 0])
    ours, size, stream = t.extension, 2.0 * count * width, t.stream

    def added(i: int) -> Tensor:
        total[i].add_(x[i])
        return functional.rms_norm(total[i], (width,), weight, 1e-5)

    def gated(i: int) -> Tensor:
        return functional.silu(wide[i, :, :width]) * wide[i, :, width:]

    return num_sets, [
        (
            f"rms_norm, {count} rows",
            2 * size,
            lambda i: ours.rms_norm(ref(out), ref(x[i]), ref(weight), 1e-5, stream),
            lambda i: functional.rms_norm(x[i], (width,), weight, 1e-5),
        ),
        (
            f"fused_add_rms_norm, {count} rows",
            4 * size,
            lambda i: ours.fused_add_rms_norm(ref(x[i]), ref(total[i]), ref(weight), 1e-5, stream),
            added,
        ),
        (f"silu_and_mul, {count} rows", 3 * size, lambda i: ours.silu_and_mul(ref(out), ref(wide[i]), stream), gated),
    ]


def products(t: Target, count: int) -> tuple[int, list[Case]]:
    """With a square matrix in bfloat16, and in 4 bits and fp8, beside cuBLAS with the bfloat16 one. Where the device
    multiplies fp8, with inputs in fp8, too, and what their rounding takes."""
    width = t.pick(4096, 64)
    num_sets = t.pick(sets(width * width // 2), 1)  # so that the smallest matrices leave the cache, too
    x = torch.randn(count, width, device=t.device).to(torch.bfloat16)
    out, ours, stream = torch.empty_like(x), t.extension, t.stream
    plain = torch.randn(num_sets, width, width, device=t.device).to(torch.bfloat16)
    nibbles = torch.randint(0, 16, (width, width), dtype=torch.uint8, device=t.device)
    halves = torch.rand(width, width // 32, device=t.device).half()
    numbers, scales = x.new_ones(width, width).to(torch.float8_e4m3fn), torch.ones(width, width // 64, device=t.device)
    packed = pack_nibbles(nibbles, halves, None), pack_nibbles(nibbles, halves, halves), pack_e4m3(numbers, scales)

    def kept(matrix: CudaMatrix) -> tuple[str, float, Call, Call]:
        copies = matrix.data.repeat(num_sets, 1)
        return (
            f"linear_packed, {matrix.format}, {count} rows",
            4.0 * x.numel() + matrix.data.numel(),
            lambda i: ours.linear_packed(ref(out), ref(x), ref(copies[i]), matrix.format, None, stream),
            cublas,
        )

    def cublas(i: int) -> Tensor:
        return functional.linear(x, plain[i])

    def in_fp8(matrix: CudaMatrix) -> list[Case]:
        copies = matrix.data.repeat(num_sets, 1)
        rounded = torch.zeros(count, width // COLUMNS * FP8_BYTES, dtype=torch.uint8, device=t.device)
        size = 2.0 * x.numel() + rounded.numel()
        return [
            (
                f"round_inputs, {count} rows",
                size,
                lambda i: ours.round_inputs(ref(rounded), ref(x), 0, 0.0, stream),
                None,
            ),
            (
                f"linear_fp8, {count} rows",
                size + matrix.data.numel(),
                lambda i: ours.linear_fp8(ref(out), ref(rounded), ref(copies[i]), None, stream),
                cublas,
            ),
        ]

    whole = 4.0 * x.numel() + 2.0 * width * width
    return num_sets, [
        (f"linear, {count} rows", whole, lambda i: ours.linear(ref(out), ref(x), ref(plain[i]), None, stream), cublas),
        *(kept(matrix) for matrix in packed),
        *(in_fp8(packed[2]) if ours.multiplies_fp8(t.device.index or 0) else []),
    ]


def logits(t: Target, count: int) -> tuple[int, list[Case]]:
    """A vocabulary of 128256 in float32, falling as in text; penalties of 1000 tokens a row."""
    vocabulary = t.pick(128256, 600)
    ranks = torch.rand(count, vocabulary, device=t.device).argsort(dim=-1).float()
    x = -1.5 * torch.log1p(ranks)
    size, ours = 4.0 * x.numel(), t.extension
    ids = torch.zeros(count, dtype=torch.int64, device=t.device)
    scored = torch.empty(count, device=t.device), torch.empty(count, NUM_TOP, device=t.device)
    likeliest = torch.empty(count, NUM_TOP, dtype=torch.int64, device=t.device)
    num_seen = t.pick(1000, 7)
    offsets = (torch.arange(count + 1, device=t.device) * num_seen).int()
    seen = torch.rand(count, vocabulary, device=t.device).topk(num_seen).indices.flatten()
    counts = torch.ones(len(seen), dtype=torch.int32, device=t.device)
    ones, zeros = torch.ones(count, device=t.device), torch.zeros(count, device=t.device)

    def penalize(i: int) -> None:
        entries = ref(offsets), ref(seen), ref(counts), None
        ours.penalize(ref(x), *entries, ref(ones), ref(zeros), ref(zeros), t.stream)

    off = torch.from_numpy(columns_of([SamplingParams()] * count)).to(t.device)

    def sample(top_k: int = 0, top_p: float = 1.0) -> Call:
        settings = [ones * 0.8, (zeros + top_k).int(), ones * top_p, zeros, off, ids.clone(), ids.clone(), ids.clone()]
        return lambda i: ours.sample(ref(ids), ref(x), *map(ref, settings), t.stream)

    return 1, [
        (f"sample, {count} rows", size, sample(), lambda i: drawn(torch.softmax(x / 0.8, -1))),
        (f"sample, top-k {TOP_K}, {count} rows", size, sample(top_k=TOP_K), lambda i: among_likeliest(x)),
        (f"sample, top-p {TOP_P}, {count} rows", size, sample(top_p=TOP_P), lambda i: within_mass(x)),
        (f"penalize, {count} rows", 20.0 * len(seen), penalize, None),
        (
            f"logprobs, {count} rows",
            size,
            lambda i: ours.logprobs(*map(ref, (*scored, likeliest, x, ids)), t.stream),
            lambda i: x.log_softmax(-1).topk(NUM_TOP),
        ),
    ]


def drawn(chances: Tensor) -> Tensor:
    """`multinomial` looks at numbers on the device, which no graph can."""
    return (chances / torch.empty_like(chances).exponential_()).argmax(-1, keepdim=True)


def among_likeliest(x: Tensor) -> Tensor:
    values, ids = (x / 0.8).topk(TOP_K)
    return ids.gather(1, drawn(torch.softmax(values, -1)))


def within_mass(x: Tensor) -> Tensor:
    values, ids = (x / 0.8).sort(dim=-1, descending=True)
    chances = torch.softmax(values, -1)
    chances = chances.masked_fill(chances.cumsum(-1) - chances > TOP_P, 0)
    return ids.gather(1, drawn(chances))


def main() -> None:
    t = target()
    torch.manual_seed(0)
    for title, cases, counts in (
        ("Ops on rows of 4096, bfloat16", hidden, t.pick((16, 2048), (2,))),
        ("Products with a matrix of 4096 x 4096, inputs in bfloat16", products, t.pick((1, 64, 2048), (2,))),
        ("From logits to tokens, vocabulary 128256, float32", logits, t.pick((16, 64), (2,))),
    ):
        report(t, title, copy_bandwidth(t), (cases(t, count) for count in counts))
    t.finish()


if __name__ == "__main__":
    main()
