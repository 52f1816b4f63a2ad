"""A small Llama through the worker's own runner: replays equal eager steps, a device equals the CPU."""

from dataclasses import replace
from typing import Any

import logit_error
import numpy as np
import torch
from steps import mixed_step, pieces, step_of, tables_of
from target import Target, target
from tiny_llama import Form, drive, logits_of, requests, tiny_llama

from gpu_worker.ops.native_cuda import NativeCudaOps
from gpu_worker.ops.reference import ReferenceOps
from gpu_worker.running.graphs import Capturer, CudaGraphCapturer


def capture(t: Target) -> Capturer:
    if not t.rehearsal:
        return CudaGraphCapturer(t.device)
    from stream_capture import StreamCapture

    return StreamCapture()


def ops(t: Target) -> NativeCudaOps:
    if not t.rehearsal:
        return NativeCudaOps(t.extension, t.device)
    from stream_capture import RecordedExtension

    recorded: Any = RecordedExtension(t.extension)
    return NativeCudaOps(recorded, t.device)


def replays_equal_eager_steps(t: Target, form: Form, tolerance: float) -> tuple[int, int]:
    """Batches of every size, ragged lengths, blocks anywhere. How many steps, and how many of them bit for bit those of
    the padded batch run eagerly; without padding, libraries may take other kernels."""
    rng = np.random.default_rng(0)
    most, blocks = t.pick(16, 3), t.pick(600, 60)
    captured = tiny_llama(form, ops(t), t.device, capture(t), blocks, most)
    eager = tiny_llama(form, NativeCudaOps(t.extension, t.device), t.device, None, blocks, most)
    for mine, other in zip(captured.arena.layers, eager.arena.layers, strict=True):
        other.copy_(mine.normal_())
    steps = exact = 0
    for count in range(1, most + 1):
        for _ in range(t.pick(5, 1)):
            lens = [int(n) for n in rng.choice([1, 7, 8, 9, 31, 64, 90, form.context], count)]
            own = rng.permutation(blocks)[:count].tolist()  # blocks may be shared: only their last must be its own
            these = [
                replace(piece, blocks=[*(block % blocks for block in piece.blocks[:-1]), block])
                for piece, block in zip(
                    pieces([(n, 1) for n in lens], rng, form.block_size, blocks + count * 64), own, strict=True
                )
            ]
            step = step_of(these, form.block_size)
            graphs = captured.runner.graphs[0]
            replayed = graphs.run(step, tables_of(step), step.sample_tokens)
            assert replayed is not None
            replayed = replayed.clone()
            with torch.inference_mode():
                batch = graphs._batches[next(size for size in graphs.sizes if size >= count)]
                hidden = captured.decoder.forward(batch, captured.arena.layers, batch.rows)
                exact += int(torch.equal(captured.decoder.logits(hidden)[:count], replayed))
            got, want = replayed.float(), logits_of(eager, step).float()
            error = float((got - want).norm() / want.norm())
            assert error < tolerance, f"{form}: {lens}: logits differ by {error:.2e}"
            for mine, other in zip(captured.arena.layers, eager.arena.layers, strict=True):
                other.copy_(mine)
            steps += 1
    return steps, exact


def mixed_replays_equal_eager_steps(t: Target, form: Form, tolerance: float) -> int:
    """Decodes, drafts and pieces of prompts together, in every captured number of tokens. How many steps."""
    rng = np.random.default_rng(1)
    blocks = t.pick(600, 60)
    captured = tiny_llama(form, ops(t), t.device, capture(t), blocks, 8, mixed_tokens=t.pick(200, 20))
    eager = tiny_llama(form, NativeCudaOps(t.extension, t.device), t.device, None, blocks, 8)
    for mine, other in zip(captured.arena.layers, eager.arena.layers, strict=True):
        other.copy_(mine.normal_())
    graphs = captured.runner.graphs[1]
    steps = 0
    for size in graphs.sizes:
        for tokens in (size, size - 3)[: t.pick(2, 1)]:
            few = [(int(n), 1) for n in rng.choice([1, 8, 40], 3)] + [(int(rng.choice([3, 20])), 3)]
            step = mixed_step([*few, (tokens - 6 + int(rng.choice([0, 9])), tokens - 6)], rng, form.block_size, blocks)
            replayed = graphs.run(step, tables_of(step), step.sample_tokens)
            assert replayed is not None
            got, want = replayed.float().clone(), logits_of(eager, step).float()
            error = float((got - want).norm() / want.norm())
            assert error < tolerance, f"{form}: a mixed step of {tokens} tokens: logits differ by {error:.2e}"
            for mine, other in zip(captured.arena.layers, eager.arena.layers, strict=True):
                other.copy_(mine)
            steps += 1
    return steps


def whole_requests_equal_the_cpus(t: Target, form: Form) -> None:
    length = t.pick(24, 3)
    want = drive(tiny_llama(form, ReferenceOps()).runner, requests(max_tokens=length))[0]
    for how, blocks in (("swap", 64), ("swap", 16), ("recompute", 16))[: t.pick(3, 1)]:
        tiny = tiny_llama(form, ops(t), t.device, capture(t), blocks)
        got, load = drive(tiny.runner, requests(max_tokens=length), preemption=how)
        assert got == want, f"{how}, {blocks} blocks: {got} is not {want}"
        t.say(
            f"requests on the device are those on the CPU with {blocks} blocks: "
            f"{load.num_preempted_swap} swapped, {load.num_preempted_recompute} computed again"
        )


def main() -> None:
    t = target()
    torch.manual_seed(0)
    if not t.rehearsal:
        torch.backends.cuda.matmul.allow_tf32 = False
    for form, tolerance in (
        (Form(window=27), 1e-4),
        (Form(window=27, head_dim=64, dtype=torch.bfloat16), 4e-2),
        (Form(heads=8, kv_heads=1, head_dim=128, block_size=16, dtype=torch.float16), 1e-2),
    )[: t.pick(3, 2)]:
        steps, exact = replays_equal_eager_steps(t, form, tolerance)
        t.say(
            f"{form.dtype}: {steps} replays say what eager steps say; {exact} bit for bit what their padded batch says"
        )
        t.say(f"{form.dtype}: {mixed_replays_equal_eager_steps(t, form, tolerance)} mixed steps, too")
    logit_error.tell(t)
    whole_requests_equal_the_cpus(t, Form(window=27))
    t.finish()


if __name__ == "__main__":
    main()
