"""Runs plans on a model: moves blocks, lays the tokens of the step out as tensors, computes logits, and samples.

Logits are made only for rows that are sampled or scored. All that a sequence needs is in its branches and blocks, so a
runner keeps nothing from step to step.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from gpu_worker.models.decoders.decoder import Decoder
from gpu_worker.ops import TokenBatch, make_batch
from gpu_worker.running.graphs import DecodeGraphs, MixedGraphs
from gpu_worker.running.memory.arena import KvArena
from gpu_worker.running.memory.arena_blocks import ArenaBlocks
from gpu_worker.running.memory.block_mover import BlockMover
from gpu_worker.running.memory.staged_blocks import StagedBlocks
from gpu_worker.running.memory.step_mark import StepMark
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.scheduling.state.sequence import Branch
from gpu_worker.scheduling.state.step import Chunk, RunnerInfo, StepOutput, StepPlan
from octavo.request.sampling import TokenScore

log = logging.getLogger(__name__)


ROWS_SCORED_AT_ONCE = 256  # bounds the memory of logits while a long prompt is scored


@dataclass(slots=True)
class _LogitRows:
    """The tokens of a step that need logits: first those that are sampled, then those that are scored."""

    rows: list[int] = field(default_factory=list)
    num_sampled: int = 0
    sampled: list[int] = field(default_factory=list)  # for each branch: its place in `rows`
    branches: list[Branch] = field(default_factory=list)
    scored: list[tuple[int, Chunk]] = field(default_factory=list)  # (position in plan.chunks, the chunk)


class ModelRunner:
    """A Runner over a real model. Not thread-safe."""

    def __init__(
        self,
        info: RunnerInfo,
        decoder: Decoder,
        arena: KvArena,
        sampler: Sampler,
        device: torch.device,
        graphs: DecodeGraphs | None = None,
        mixed_graphs: MixedGraphs | None = None,
        *,
        staged: bool = False,
    ) -> None:
        """`staged`: blocks go to other workers by way of a staging area on a CPU, too, for tests of what a GPU does."""
        self._info = info
        self._decoder = decoder
        self._arena = arena
        self._block_mover = BlockMover(arena)
        self._sampler = sampler
        self._device = device
        self._graphs = graphs
        self._mixed_graphs = mixed_graphs
        self._mark = StepMark(device)
        self._staged = staged or device.type != "cpu"
        # The extension's kernels run on the current device, and each thread has one of its own.
        self._current_device: AbstractContextManager[object] = (
            torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        )

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def layers(self) -> Sequence[Tensor]:
        """The blocks on the device, layer by layer."""
        return self._arena.layers

    @cached_property
    def block_memory(self) -> ArenaBlocks | StagedBlocks:
        """On a GPU the staging area is allocated when this is first asked for, which is to be before the first step."""
        if not self._staged:
            return self._arena.blocks_in_place()
        with self._mark.after_steps():
            return self._arena.staged_blocks(self._mark)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        with self._current_device:
            try:
                return self._run(plan)
            finally:
                self._mark.note_steps()

    def _run(self, plan: StepPlan) -> StepOutput:
        copy_s = self._block_mover.move_blocks(plan)
        output = StepOutput([], copy_s=copy_s, demote_s=self._block_mover.demote_blocks(plan))
        if not plan.chunks:
            return output
        wanted = _wanted_rows(plan.chunks)
        logits = self._graphs.run(plan) if self._graphs is not None else None
        if logits is None and self._mixed_graphs is not None:
            logits = self._mixed_graphs.run(plan, wanted.rows)
        if logits is None:
            batch = lay_out(plan.chunks, self._info.block_size, self._device, wanted.rows)
            hidden = self._decoder.forward(batch, self._arena.layers, batch.rows)
            if wanted.branches:
                logits = self._decoder.logits(hidden[: wanted.num_sampled])
            if wanted.scored:
                output.scored = self._score(hidden[wanted.num_sampled :], wanted.scored)
        if logits is not None and wanted.branches:
            output.token_ids, output.scores = self._sampler.sample(logits, wanted.sampled, wanted.branches)
        output.is_copying = self._block_mover.is_copying()
        return output

    def check_device(self) -> None:
        """Computes something small: after some faults of a GPU, each further call of the process fails, too."""
        with self._current_device:
            torch.ones(1, device=self._device).add(1).item()

    def close(self) -> None:
        """Gives the blocks' memory back."""
        try:
            self._block_mover.wait_for_copies()
        finally:
            self._arena.layers.clear()
            self.__dict__.pop("block_memory", None)
            del self._block_mover, self._arena, self._decoder, self._graphs, self._mixed_graphs

    def _score(self, hidden: Tensor, scored: Sequence[tuple[int, Chunk]]) -> dict[int, list[TokenScore]]:
        result: dict[int, list[TokenScore]] = {}
        start = 0
        for index, chunk in scored:
            branch, position = chunk.branch, chunk.score_from
            result[index] = []
            while position < chunk.score_end:
                part_end = branch.num_prompt if position < branch.num_prompt else chunk.score_end
                end = min(part_end, chunk.score_end, position + ROWS_SCORED_AT_ONCE)
                logits = self._decoder.logits(hidden[start : start + end - position])
                if position < branch.num_prompt:
                    num_top = branch.sequence.params.prompt_logprobs or 0
                    result[index] += self._sampler.score(logits, branch.tokens[position:end], num_top)
                else:
                    result[index] += self._sampler.score_output(logits, branch, position)
                start += end - position
                position = end
        return result


def lay_out(chunks: Sequence[Chunk], block_size: int, device: torch.device, rows: Sequence[int] = ()) -> TokenBatch:
    """The chunks as one batch, in which token i of the plan is row i. Logits are wanted for `rows`."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    tables: list[list[int]] = []
    for chunk in chunks:
        blocks, end = chunk.branch.blocks, chunk.start + chunk.length
        token_ids += chunk.branch.tokens[chunk.start : end]
        positions += range(chunk.start, end)
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(chunk.start, end)]
        tables.append([*blocks[: (end - 1) // block_size + 1]])
    lengths = [chunk.length for chunk in chunks]
    ends = [chunk.start + chunk.length for chunk in chunks]
    return make_batch(token_ids, positions, slots, lengths, ends, tables, device, rows)


def _wanted_rows(chunks: Sequence[Chunk]) -> _LogitRows:
    wanted = _LogitRows()
    scored_rows: list[int] = []
    first = 0
    for index, chunk in enumerate(chunks):
        if chunk.samples:
            wanted.sampled += [len(wanted.rows)] * len(chunk.samples)
            wanted.branches += chunk.samples
            wanted.rows.append(first + chunk.length - 1)
        if chunk.score_from >= 0:
            # The token at position p is predicted by the row before it, which must be in this chunk.
            if chunk.score_from <= chunk.start:
                raise ValueError(f"cannot score position {chunk.score_from} in a chunk that starts at {chunk.start}")
            scored_rows += range(first + chunk.score_from - 1 - chunk.start, first + chunk.score_end - 1 - chunk.start)
            wanted.scored.append((index, chunk))
        first += chunk.length
    wanted.num_sampled = len(wanted.rows)
    wanted.rows += scored_rows
    return wanted
