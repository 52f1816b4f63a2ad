"""A small Llama over the kernels: captured steps say what the same steps say when run; swaps run beside steps."""

from typing import Any

import _C_cuda_simt as native
import torch
from arrays import BF16, F32, TOLERANCE, close
from steps import decodes, mixed_step, pieces, step_of, tables_of
from stream_capture import RecordedExtension, StreamCapture
from tiny_llama import CPU, Form, drive, logits_of, request, tiny_llama

from gpu_worker.ops import cuda_plan, native_cuda
from gpu_worker.ops.native_cuda import NativeCudaOps


def any_form(rng: Any, **fixed: Any) -> Form:
    torch.set_num_threads(1)
    drawn = {"dtype": [torch.float32, torch.bfloat16][int(rng.integers(2))], "window": int(rng.choice([0, 19]))}
    return Form(head_dim=32, **drawn | fixed)


def twins(form: Form, blocks: int, mixed_tokens: int, invariant: bool = False) -> tuple[Any, Any, StreamCapture]:
    """A model whose steps are captured, an eager one with the same numbers in its blocks, and what was captured."""
    capture = StreamCapture()
    recorded, plain = (NativeCudaOps(x, CPU, batch_invariant=invariant) for x in (RecordedExtension(native), native))
    sizes = {"num_blocks": blocks, "max_sequences": 4, "mixed_tokens": mixed_tokens}
    captured, eager = tiny_llama(form, recorded, capture=capture, **sizes), tiny_llama(form, plain, num_blocks=blocks)
    for mine, other in layers(captured, eager):
        other.copy_(mine.normal_())
    return captured, eager, capture


def layers(one: Any, other: Any) -> Any:
    return zip(one.arena.layers, other.arena.layers, strict=True)


def graphs_case(rng: Any) -> None:
    form = any_form(rng, block_size=int(rng.choice([8, 16])))
    captured, eager, capture = twins(form, 60, 24)
    few = TOLERANCE[F32 if form.dtype == torch.float32 else BF16] * 4
    for number in range(5):
        lens = [int(rng.choice([1, 7, 8, 9, 40, 150])) for _ in range(int(rng.integers(1, 5)))]
        if number < 3:
            step = decodes(lens, rng, form.block_size, 60)
        else:  # decodes, drafts of a few tokens, and longer chunks
            step = mixed_step([(n, min(n, int(rng.choice([1, 2, 3, 9])))) for n in lens], rng, form.block_size, 60)
        logits = captured.runner.graphs[int(number > 2)].run(step, tables_of(step), step.sample_tokens)
        got, want = logits.double().numpy().copy(), logits_of(eager, step).double().numpy()
        close(got, want, few, f"graphs {form=} {lens=} {number=}")
        for mine, other in layers(captured, eager):
            limit = 1e-2 if form.dtype == torch.bfloat16 else 1e-5
            close(mine.double().numpy(), other.double().numpy(), limit, "blocks")
            other.copy_(mine)
    assert len(capture.replays) == 5


def swapped_case(rng: Any) -> None:
    """Too few blocks: sequences go out and come back, while others run, and say what they say with blocks for all."""
    form = any_form(rng, dtype=torch.float32)
    prompts = [[(i * 37 + j * 11) % 96 for j in range(n)] for i, n in enumerate((21, 8, 16))]

    def run(num_blocks: int) -> Any:
        runner = tiny_llama(form, NativeCudaOps(native, CPU), num_blocks=num_blocks).runner
        runner._block_mover._num_swaps = 2  # the second would be waited for, to measure it
        sequences = [request(i, prompt, max_tokens=14) for i, prompt in enumerate(prompts)]
        return drive(runner, sequences, preemption="swap")

    want, _ = run(40)
    native.runtime.take_calls()
    got, workload = run(int(rng.integers(8, 11)))
    assert got == want and workload.num_preempted_swap > 0
    calls = native.runtime.take_calls()
    assert "b" in calls or "k" in calls


def invariant_case(rng: Any) -> None:
    """Pieces and tiles of fixed sizes: what a sequence gets has the same bits alone and beside others."""
    form = any_form(rng)
    native_cuda.FIXED_PIECE = 64  # so that there are several
    tiny = tiny_llama(form, NativeCudaOps(native, CPU, batch_invariant=True), num_blocks=60)
    before = [layer.normal_().clone() for layer in tiny.arena.layers]
    lens = [int(rng.choice([1, 9, 64, 65, 150])) for _ in range(3)]
    these = pieces([(n, min(n, 1 + int(rng.choice([0, 3, 40])))) for n in lens], rng, form.block_size, 60)
    together = logits_of(tiny, step_of(these, form.block_size)).clone()
    for i in rng.permutation(len(these)):
        for layer, old in zip(tiny.arena.layers, before, strict=True):
            layer.copy_(old)
        alone = logits_of(tiny, step_of([these[i]], form.block_size))
        assert torch.equal(alone[0], together[i]), f"{form=} {lens} {[piece.length for piece in these]} {i}"


def invariant_graphs_case(rng: Any) -> None:
    """With pieces of fixed lengths, a captured step has the very bits of one that runs, or is not replayed: where its
    pieces are more than the plan has room for."""
    form, roomy = any_form(rng), bool(rng.integers(2))
    native_cuda.FIXED_PIECE, before = 64, cuda_plan.PARTS_BYTES
    try:
        cuda_plan.PARTS_BYTES = before if roomy else 1024  # less than one piece has
        captured, eager, _ = twins(form, 120, 40, invariant=True)
        for number, lens in ((0, (60, 1, 33)), (0, (150, 65)), (1, (9, 40, 33)), (1, (255, 255, 30))):
            shape = [(n, 1) for n in lens] if number == 0 else [(lens[0], 1), *((n, min(n, 17)) for n in lens[1:])]
            step = mixed_step(shape, rng, form.block_size, 120)
            logits = captured.runner.graphs[number].run(step, tables_of(step), step.sample_tokens)
            assert (logits is not None) == (roomy or max(lens) <= 64), (form, lens)
            if logits is not None:
                assert torch.equal(logits, logits_of(eager, step)), (form, lens)
                assert all(torch.equal(mine, other) for mine, other in layers(captured, eager))
    finally:
        cuda_plan.PARTS_BYTES = before
