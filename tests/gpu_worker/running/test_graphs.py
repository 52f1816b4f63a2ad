"""Captured steps say what steps run operation by operation say.

A fake stands in for the device (tests/support/stream_capture.py): it replays exactly what was recorded, on exactly the
memory it was recorded on. tests/csrc runs the same with the CUDA kernels' own sources, tests/gpu on a GPU.
"""

import logging

import numpy as np
import pytest
import tiny_llama
import torch
from effort import some
from steps import decodes, mixed_step, tables_of
from stream_capture import StreamCapture, launch
from tiny_llama import Form, drive, logits_of, request, requests
from torch import Tensor

from gpu_worker.ops import AttentionOptions, TokenBatch
from gpu_worker.ops.batch import packed
from gpu_worker.ops.reference import ReferenceOps
from gpu_worker.running.graphs import capture_graphs
from gpu_worker.steps.step_input import KnownTokens, StepInput, longs

torch.set_num_threads(1)
FORM = Form(window=27)
SIZE = FORM.block_size


class TorchKernels(ReferenceOps):
    """Ops as CUDA's are: kernels that find every number in memory, and a plan that is worked out on the host."""

    name = "kernels in torch"

    def captures(self, kv: Tensor) -> bool:
        return True

    def cache_write(self, kv: Tensor, keys: Tensor, values: Tensor, batch: TokenBatch) -> None:
        launch(self._write, kv, keys, values, batch.slots)

    def paged_attention(self, queries: Tensor, kv: Tensor, batch: TokenBatch, options: AttentionOptions) -> Tensor:
        plan = batch.scratch.get("plan")
        if plan is None:
            plan = batch.scratch["plan"] = torch.tensor(batch.kv_lens, dtype=torch.int32)
        out = torch.empty_like(queries)
        launch(self._attend, out, queries, kv, options, batch.cu_q, batch.seq_lens, batch.block_tables, plan)
        return out

    def refill(self, batch: TokenBatch) -> bool:
        batch.scratch["plan"].copy_(torch.tensor(batch.kv_lens, dtype=torch.int32))
        return True

    def _write(self, kv: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                block, place = divmod(slot, SIZE)
                kv[block, :, 0, place], kv[block, :, 1, place] = keys[token], values[token]

    def _attend(self, out: Tensor, queries: Tensor, kv: Tensor, options: AttentionOptions, *memory: Tensor) -> None:
        cu_q, lens, tables, plan = memory
        assert torch.equal(plan, lens), "the plan is of another step"
        for i, n in enumerate(lens.tolist()):
            rows = slice(int(cu_q[i]), int(cu_q[i + 1]))
            count = rows.stop - rows.start
            one = TokenBatch(
                **dict.fromkeys(("token_ids", "positions", "slots", "rows"), torch.empty(0)),
                cu_q=torch.tensor([0, count]),
                seq_lens=lens[i : i + 1],
                block_tables=tables[i : i + 1],
                q_lens=[count],
                kv_lens=[n],
            )
            out[rows] = super().paged_attention(queries[rows], kv, one, options) if n else 0


def make(ops: TorchKernels | None = None, **options) -> tuple[tiny_llama.Tiny, StreamCapture]:
    capture = StreamCapture()
    return tiny_llama.tiny_llama(FORM, ops or TorchKernels(), capture=capture, **options), capture


def copy_arena(source: tiny_llama.Tiny, target: tiny_llama.Tiny) -> None:
    for mine, other in zip(source.arena.layers, target.arena.layers, strict=True):
        other.copy_(mine)


def compare(captured: tiny_llama.Tiny, number: int, step: StepInput, eager: tiny_llama.Tiny) -> None:
    """Replays a step, and runs it eagerly: logits and blocks are the same."""
    rows = step.sample_tokens.tolist()
    logits = captured.runner.graphs[number].run(step, tables_of(step), rows).clone()
    assert logits.shape[0] == len(rows) and torch.isfinite(logits).all()
    torch.testing.assert_close(logits, logits_of(eager, step), rtol=1e-4, atol=1e-4)
    for mine, other in zip(captured.arena.layers, eager.arena.layers, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def with_twin(**options) -> tuple[tiny_llama.Tiny, StreamCapture, tiny_llama.Tiny]:
    """A model with captured steps, and one that runs them eagerly, on the same random blocks."""
    captured, capture = make(num_blocks=200, **options)
    eager = tiny_llama.tiny_llama(FORM, TorchKernels(), num_blocks=200)
    for mine in captured.arena.layers:
        mine.normal_()
    copy_arena(captured, eager)
    return captured, capture, eager


@pytest.mark.parametrize("count", some(range(1, 17), [1, 2, 3, 7, 8, 9, 15, 16]))
def test_a_replay_is_the_step_run_eagerly(count):
    """Every batch size up to the largest, each for several steps of ragged lengths, after other sizes have run."""
    rng = np.random.default_rng(count)
    captured, capture, eager = with_twin()
    for number in range(3):
        lens = [int(rng.choice([1, 2, SIZE - 1, SIZE, SIZE + 1, 26, 27, 28, 60, 90])) for _ in range(count)]
        if number == 1:
            other_step = decodes([5] * (17 - count), rng, SIZE, 200)
            captured.runner.graphs[0].run(other_step, tables_of(other_step), other_step.sample_tokens)
            copy_arena(captured, eager)
        compare(captured, 0, decodes(lens, rng, SIZE, 200), eager)
    assert len(capture.replays) == 4


def mixed_shape(rng: np.random.Generator, tokens: int) -> list[tuple[int, int]]:
    """Decodes, then a few chunks of prompts, with so many tokens together."""
    decodes_of = [(int(rng.integers(1, 60)), 1) for _ in range(int(rng.integers(0, min(5, tokens))))]
    left, chunks = tokens - len(decodes_of), []
    while left:
        length = left if len(chunks) == 3 else int(rng.integers(1, left + 1))
        chunks.append((length + int(rng.choice([0, 0, SIZE, 37])), length))
        left -= length
    return decodes_of + chunks


@pytest.mark.parametrize("tokens", some([1, 2, 7, 15, 16, 17, 31, 33, 40], [1, 7, 16, 17, 40]))
def test_a_replayed_mixed_step_is_the_step_run_eagerly(tokens):
    """Several steps of decodes and chunks of prompts, after a step of another size has left its numbers behind."""
    rng = np.random.default_rng(tokens)
    captured, capture, eager = with_twin(mixed_tokens=40)
    before = mixed_step([(20, 20), (9, 9)], rng, SIZE, 200)
    captured.runner.graphs[1].run(before, tables_of(before), [19, 28])
    copy_arena(captured, eager)
    for _ in range(3):
        compare(captured, 1, mixed_step(mixed_shape(rng, tokens), rng, SIZE, 200, silent=1), eager)
    assert len(capture.replays) == 4


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return drive(tiny_llama.tiny_llama(FORM, TorchKernels()).runner, requests())[0]


def test_whole_requests_with_mixed_graphs_are_those_without(alone):
    few, rare = make()
    drive(few.runner, requests(), max_batch_tokens=24)
    tiny, capture = make(mixed_tokens=24)
    seen: list[StepInput] = []
    outputs, _ = drive(tiny.runner, requests(), seen.append, max_batch_tokens=24)
    assert outputs == alone == drive(tiny_llama.tiny_llama(FORM, ReferenceOps()).runner, requests())[0]
    assert any(0 < step.num_decodes < len(step.seats) for step in seen), "decodes and pieces of prompts mix"
    assert len(capture.replays) == sum(1 for step in seen if step.seats) > len(rare.replays), "all are replayed"


@pytest.mark.parametrize("how", ["swap", "recompute"])
def test_preemption_between_steps_changes_nothing(alone, how):
    """16 blocks for six sequences that want 39: rows change places, and blocks come back elsewhere."""
    tiny, capture = make(num_blocks=16)
    outputs, load = drive(tiny.runner, requests(), preemption=how)
    assert outputs == alone
    assert (load.num_preempted_swap if how == "swap" else load.num_preempted_recompute) > 0
    assert len(capture.replays) > 10


def test_branches_that_copy_on_write_are_those_of_eager_steps():
    def run(tiny: tiny_llama.Tiny) -> list[list[int]]:
        return drive(tiny.runner, [request(7, tiny_llama.PROMPTS[0], temperature=1.0, n=3, logprobs=2)])[0]

    tiny, capture = make()
    outputs = run(tiny)
    assert outputs == run(tiny_llama.tiny_llama(FORM, TorchKernels()))
    assert len(capture.replays) > 15 and len({tuple(output) for output in outputs}) == 3


def test_steps_that_do_not_fit_are_not_replayed():
    rng = np.random.default_rng(0)
    tiny, capture = make(num_blocks=100, max_sequences=4, mixed_tokens=24)
    context = FORM.context

    def steps(*shapes: list[tuple[int, int]]) -> list[StepInput]:
        return [mixed_step(shape, rng, SIZE, 100) for shape in shapes]

    def one(length: int, count: int = 1) -> StepInput:
        return decodes([length] * count, rng, SIZE, 100)

    scored, (scored_mixed,) = one(20), steps([(20, 20)])
    scored.scored.append(KnownTokens(0, 20, longs([1])))
    scored_mixed.scored.append(KnownTokens(0, 5, longs([1] * 15)))
    refused = [StepInput(1), one(3, 5), *steps([(20, 20)], [(5, 1), (20, 20)]), scored, one(context + 1)]
    refused_mixed = [StepInput(1), *steps([(25, 25)], [(3, 3)] * 5, [(context + 1, 20)]), scored_mixed]
    for graphs, wrong, right in [
        (tiny.runner.graphs[0], refused, [one(3, 4), one(context)]),
        (tiny.runner.graphs[1], refused_mixed, steps([(24, 24)])),
    ]:
        num_replays = len(capture.replays)
        for step in wrong:
            assert graphs.run(step, tables_of(step), step.sample_tokens) is None
        assert len(capture.replays) == num_replays
        for step in right:
            assert graphs.run(step, tables_of(step), step.sample_tokens) is not None


def test_a_step_whose_plan_has_no_room_is_not_replayed():
    class Small(TorchKernels):
        def refill(self, batch: TokenBatch) -> bool:
            return max(batch.kv_lens) <= 20 and super().refill(batch)

    rng = np.random.default_rng(0)
    tiny, capture = make(Small(), num_blocks=100, mixed_tokens=24)
    long, short = mixed_step([(21, 3)], rng, SIZE, 100), mixed_step([(20, 3)], rng, SIZE, 100)
    for graphs, expected in ((tiny.runner.graphs[1], short), (tiny.runner.graphs[0], decodes([9], rng, SIZE, 100))):
        assert graphs.run(long, tables_of(long), long.sample_tokens) is None
        assert graphs.run(expected, tables_of(expected), expected.sample_tokens) is not None
    outputs, _ = drive(make(Small())[0].runner, requests())
    assert outputs == drive(tiny_llama.tiny_llama(FORM, TorchKernels()).runner, requests())[0]
    assert len(capture.replays) == 2


def test_what_cannot_be_captured_runs_eagerly_and_says_so(caplog):
    class Looks(TorchKernels):
        def cache_write(self, kv: Tensor, keys: Tensor, values: Tensor, batch: TokenBatch) -> None:
            if batch.slots.max().item() >= 0:
                super().cache_write(kv, keys, values, batch)

    def captured(ops: ReferenceOps) -> int:
        tiny = tiny_llama.tiny_llama(FORM, ops)
        return len(capture_graphs(tiny.decoder, tiny.arena.layers, ops, 4, 64, tiny_llama.CPU, StreamCapture(), 16))

    caplog.set_level(logging.INFO)
    assert captured(ReferenceOps()) == 0
    assert "no CUDA graphs: llama and reference ops cannot be captured together" in caplog.text
    assert captured(Looks()) == 0
    assert "capturing failed: operation not permitted when stream is capturing" in caplog.text
    assert captured(TorchKernels()) == 2


def test_arrays_in_one_piece_are_what_they_were():
    arrays = [torch.arange(7), torch.zeros(0, dtype=torch.int32), torch.randn(3, 5), torch.tensor([True, False])]
    for given, got in zip(arrays, packed(arrays, tiny_llama.CPU), strict=True):
        assert (got.dtype == given.dtype and got.data_ptr() % 16 == 0) or not given.numel()
        assert torch.equal(got, given)
