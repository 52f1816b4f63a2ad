"""A small Llama over the kernels: captured steps say what the same steps say when run; swaps run beside steps."""

from typing import Any

import _C_cuda_simt as native
from arrays import BF16, F32, TOLERANCE, close


def graph_case(rng: Any) -> None:
    import torch
    from steps import decodes, mixed_step, tables_of
    from stream_capture import RecordedExtension, StreamCapture
    from tiny_llama import CPU, Form, logits_of, tiny_llama

    from gpu_worker.ops.native_cuda import NativeCudaOps

    torch.set_num_threads(1)
    dtype = [torch.float32, torch.bfloat16][int(rng.integers(2))]
    form = Form(head_dim=32, window=int(rng.choice([0, 19])), block_size=int(rng.choice([8, 16])), dtype=dtype)
    ops = NativeCudaOps(RecordedExtension(native), CPU)
    capture = StreamCapture()
    captured = tiny_llama(form, ops, capture=capture, num_blocks=60, max_sequences=4, mixed_tokens=24)
    eager = tiny_llama(form, NativeCudaOps(native, CPU), num_blocks=60)
    for mine, other in zip(captured.arena.layers, eager.arena.layers, strict=True):
        other.copy_(mine.normal_())
    for number in range(5):
        lens = [int(rng.choice([1, 7, 8, 9, 40, 150])) for _ in range(int(rng.integers(1, 5)))]
        if number < 3:
            step = decodes(lens, rng, form.block_size, 60)
            logits = captured.runner.graphs[0].run(step, tables_of(step), step.sample_tokens)
        else:  # decodes, drafts of a few tokens, and longer chunks
            shape = [(n, min(n, int(rng.choice([1, 2, 3, 9])))) for n in lens]
            step = mixed_step(shape, rng, form.block_size, 60)
            logits = captured.runner.graphs[1].run(step, tables_of(step), step.sample_tokens)
        got = logits.double().numpy().copy()
        want = logits_of(eager, step).double().numpy()
        close(got, want, TOLERANCE[F32 if dtype == torch.float32 else BF16] * 4, f"graphs {form=} {lens=} {number=}")
        for mine, other in zip(captured.arena.layers, eager.arena.layers, strict=True):
            close(mine.double().numpy(), other.double().numpy(), 1e-2 if dtype == torch.bfloat16 else 1e-5, "blocks")
            other.copy_(mine)
    assert len(capture.replays) == 5


def swapped_case(rng: Any) -> None:
    """Too few blocks: sequences go out and come back, while others run, and say what they say with blocks for all."""
    import torch
    from tiny_llama import CPU, Form, drive, request, tiny_llama

    from gpu_worker.ops.native_cuda import NativeCudaOps

    torch.set_num_threads(1)
    form = Form(head_dim=32, window=int(rng.choice([0, 19])))
    ops = NativeCudaOps(native, CPU)

    def run(num_blocks: int) -> Any:
        prompts = [[(i * 37 + j * 11) % 96 for j in range(n)] for i, n in enumerate((21, 8, 16))]
        sequences = [request(i, prompt, max_tokens=14) for i, prompt in enumerate(prompts)]
        runner = tiny_llama(form, ops, num_blocks=num_blocks).runner
        runner._block_mover._num_swaps = 2  # the second would be waited for, to measure it
        return drive(runner, sequences, preemption="swap")

    want, _ = run(40)
    native.runtime.take_calls()
    got, workload = run(int(rng.integers(8, 11)))
    assert got == want
    assert workload.num_preempted_swap > 0
    calls = native.runtime.take_calls()
    assert "b" in calls or "k" in calls


def invariant_case(rng: Any) -> None:
    """Pieces and tiles of fixed sizes: what a sequence gets has the same bits alone and beside others."""
    import torch
    from steps import pieces, step_of
    from tiny_llama import CPU, Form, logits_of, tiny_llama

    from gpu_worker.ops import native_cuda

    torch.set_num_threads(1)
    native_cuda.FIXED_PIECE = 64  # so that there are several
    dtype = [torch.float32, torch.bfloat16][int(rng.integers(2))]
    form = Form(head_dim=32, window=int(rng.choice([0, 19])), dtype=dtype)
    ops = native_cuda.NativeCudaOps(native, CPU, batch_invariant=True)
    tiny = tiny_llama(form, ops, num_blocks=60)
    for layer in tiny.arena.layers:
        layer.normal_()
    lens = [int(rng.choice([1, 9, 64, 65, 150])) for _ in range(3)]
    these = pieces([(n, min(n, 1 + int(rng.choice([0, 3, 40])))) for n in lens], rng, form.block_size, 60)
    before = [layer.clone() for layer in tiny.arena.layers]
    together = logits_of(tiny, step_of(these, form.block_size)).clone()
    for i in rng.permutation(len(these)):
        for layer, old in zip(tiny.arena.layers, before, strict=True):
            layer.copy_(old)
        alone = logits_of(tiny, step_of([these[i]], form.block_size))
        assert torch.equal(alone[0], together[i]), f"{form=} {lens} {[piece.length for piece in these]} {i}"


def invariant_graphs_case(rng: Any) -> None:
    """With pieces of fixed lengths, a captured step has the very bits of one that runs, or is not replayed: where its
    pieces are more than the plan has room for."""
    import torch
    from steps import mixed_step, tables_of
    from stream_capture import RecordedExtension, StreamCapture
    from tiny_llama import CPU, Form, logits_of, tiny_llama

    from gpu_worker.ops import cuda_plan, native_cuda

    torch.set_num_threads(1)
    native_cuda.FIXED_PIECE, before = 64, cuda_plan.PARTS_BYTES
    dtype = [torch.float32, torch.bfloat16][int(rng.integers(2))]
    form = Form(head_dim=32, window=int(rng.choice([0, 19])), dtype=dtype)
    roomy = bool(rng.integers(2))
    try:
        cuda_plan.PARTS_BYTES = before if roomy else 1024  # less than one piece has
        captured, eager = (
            tiny_llama(
                form,
                native_cuda.NativeCudaOps(extension, CPU, batch_invariant=True),
                capture=capture,
                num_blocks=120,
                max_sequences=4,
                mixed_tokens=40,
            )
            for extension, capture in ((RecordedExtension(native), StreamCapture()), (native, None))
        )
        for mine, other in zip(captured.arena.layers, eager.arena.layers, strict=True):
            other.copy_(mine.normal_())
        for number, lens in ((0, (60, 1, 33)), (0, (150, 65)), (1, (9, 40, 33)), (1, (255, 255, 30))):
            shape = [(n, 1) for n in lens] if number == 0 else [(lens[0], 1), *((n, min(n, 17)) for n in lens[1:])]
            step = mixed_step(shape, rng, form.block_size, 120)
            logits = captured.runner.graphs[number].run(step, tables_of(step), step.sample_tokens)
            assert (logits is not None) == (roomy or max(lens) <= 64), (form, lens)
            if logits is not None:
                assert torch.equal(logits, logits_of(eager, step)), (form, lens)
                for mine, other in zip(captured.arena.layers, eager.arena.layers, strict=True):
                    assert torch.equal(mine, other)
    finally:
        cuda_plan.PARTS_BYTES = before
