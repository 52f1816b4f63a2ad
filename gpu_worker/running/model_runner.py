"""Runs steps on a model: moves blocks, lays the tokens of the step out as tensors, computes logits, and samples.

Logits are made only for rows that are sampled or scored. From step to step a runner keeps blocks and seats.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.decoders.decoder import Decoder
from gpu_worker.models.decoders.gpt import GptDecoder
from gpu_worker.models.decoders.native_llama import NativeLlamaDecoder
from gpu_worker.models.decoders.ranks.gpt_team import GptTeam
from gpu_worker.ops import make_batch
from gpu_worker.ops.lora import LoraRows
from gpu_worker.running.adapter_bank import AdapterBank
from gpu_worker.running.encoder_bank import EncoderBank
from gpu_worker.running.graphs import StepGraphs
from gpu_worker.running.memory.arena import KvArena, StepMark
from gpu_worker.running.memory.block_mover import BlockMover
from gpu_worker.running.memory.rank_arena import RankArena
from gpu_worker.running.picture_bank import PictureBank, SoundBank
from gpu_worker.running.pooled_rows import pooled_of, rows_of
from gpu_worker.sampling.adjustments import is_adjusted
from gpu_worker.sampling.native_sampler import NativeSampler
from gpu_worker.sampling.sampler import Sampler, num_top
from gpu_worker.steps.runner import BlockMemory, RunnerInfo, StepOutput, ignore
from gpu_worker.steps.seats import Seat, Seats
from gpu_worker.steps.step_input import KnownTokens, StepInput
from octavo.request.ids import BlockId
from octavo.request.sampling import TokenScore

log = logging.getLogger(__name__)


ROWS_SCORED_AT_ONCE = 256  # bounds the memory of logits while a long prompt is scored


@dataclass(slots=True)
class _LogitRows:
    """The tokens of a step that are wanted: those that are sampled, then those that are scored, then hidden states."""

    rows: list[int] = field(default_factory=list)
    num_sampled: int = 0
    num_scored: int = 0  # sampled or scored; those whose states are wanted come after them
    sampled: list[int] = field(default_factory=list)  # for each sample: its place in `rows`


class ModelRunner:
    """A Runner over a real model. Not thread-safe."""

    def __init__(
        self,
        info: RunnerInfo,
        decoder: Decoder,
        arena: KvArena,
        sampler: Sampler,
        device: torch.device,
        graphs: Sequence[StepGraphs] = (),
        *,
        staged: bool = False,
    ) -> None:
        """`staged`: blocks go to other workers by way of a staging area on a CPU, too, for tests of what a GPU does."""
        self._info = info
        self._decoder = decoder
        self._arena = arena
        self._block_mover = BlockMover(arena)
        self.adapters = AdapterBank(decoder.load_lora, device) if decoder.load_lora is not None else None
        self.pictures: PictureBank | None = None
        if decoder.encode_picture is not None and not info.pictures.refusal:
            bank = SoundBank if info.pictures.is_sound else PictureBank
            self.pictures = bank(decoder.encode_picture, info.pictures, device)
        self._encodings = EncoderBank(decoder.encode) if decoder.encode is not None else None
        self._seats = Seats(with_adapters=self.adapters is not None, with_pictures=self.pictures is not None)
        self._sampler = sampler
        self._device = device
        self.graphs = graphs  # in the order in which a step tries them
        self._mark = StepMark(device)
        self.on_moved: Callable[[StepInput], None] | None = None  # called when the blocks of a step have been moved
        self.on_several_hosts = False
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
        return self._arena.layers

    @cached_property
    def block_memory(self) -> BlockMemory:
        """On a GPU the staging area is allocated when this is first asked for, which is to be before the first step."""
        if not self._staged:
            return self._arena.blocks_in_place()
        with self._mark.after_steps():
            return self._arena.staged_blocks(self._mark)

    @torch.inference_mode()
    def run(self, step: StepInput, on_copied: Callable[[], None] = ignore) -> StepOutput:
        """On a GPU `on_copied` is never called: its copies are queued, and made while this computes."""
        with self._current_device:
            try:
                return self._run(step, on_copied)
            finally:
                self._mark.note_steps()

    def _run(self, step: StepInput, on_copied: Callable[[], None]) -> StepOutput:
        self._seats.update(step)
        seats = self._seats.of_chunks(step)
        copy_s = self._block_mover.move_blocks(step, self._used_blocks(step, seats))
        if self.on_moved is not None:
            self.on_moved(step)
        output = StepOutput([], copy_s=copy_s, demote_s=self._block_mover.demote_blocks(step))
        if self._device.type == "cpu" and not self._block_mover.is_copying():
            on_copied()
        if not seats:
            return output
        self._arena.expect_writes(step.slots)
        wanted = _wanted_rows(step)
        tables = [seat.table for seat in seats]
        loras = self.adapters.rows_of(seats, step.lengths) if self.adapters is not None else None
        graphs = self.graphs if loras is None else ()  # a graph has no adapter in it
        replays = (each.run(step, tables, wanted.rows) for each in graphs)
        logits = next((logits for logits in replays if logits is not None), None)
        hidden = None if logits is not None else self._forward(step, seats, loras, wanted.rows)
        branches = self._seats.samples(step)
        if hidden is not None and wanted.sampled:
            some = hidden[: wanted.num_sampled]
            asking = self._asking
            logits = self._logits(some, asking and asking.wanted(len(some), wanted.sampled, branches))
        if logits is not None and wanted.sampled:
            output.token_ids, output.scores = self._sampler.sample(logits, wanted.sampled, branches)
        if hidden is not None and step.scored:
            output.scored = self._score(hidden[wanted.num_sampled :], step.scored, seats)
        if hidden is not None and step.pooled:
            output.pooled = pooled_of(step, self._decoder, hidden, wanted.num_scored)
        output.is_copying = self._block_mover.is_copying()
        return output

    def _forward(self, step: StepInput, seats: Sequence[Seat], loras: LoraRows | None, rows: Sequence[int]) -> Tensor:
        batch = make_batch(
            *(step.tokens, step.positions, step.slots, step.lengths.tolist(), step.ends.tolist()),
            *([seat.table for seat in seats], self._device, rows),
        )
        batch.loras = loras
        if self.pictures is not None:
            self.pictures.tell(batch, seats, step)
        if self._encodings is not None:
            batch.encoded = self._encodings.rows_of(seats, step)
        return self._decoder.forward(batch, self._arena.layers, batch.rows)

    @property
    def _asking(self) -> NativeSampler | None:
        """The sampler, if other hosts compute some of the logits: it says what they need to send."""
        return self._sampler if self.on_several_hosts and isinstance(self._sampler, NativeSampler) else None

    def _logits(self, hidden: Tensor, wanted: Any = None) -> Tensor:
        """`wanted`: a WantedLogits, what is looked at of these rows; None: all."""
        decoder = self._decoder
        if wanted is not None and isinstance(decoder, NativeLlamaDecoder):
            return decoder.logits(hidden, wanted)
        if wanted is not None and isinstance(decoder, GptDecoder) and isinstance(decoder.ranks, GptTeam):
            return decoder.ranks.logits(decoder, hidden, wanted)
        return decoder.logits(hidden)

    def _used_blocks(self, step: StepInput, seats: Sequence[Seat]) -> Iterator[BlockId]:
        """The blocks that the chunks read or write: not those that are out of every layer's window."""
        size, window_blocks = self._info.block_size, self._info.window_blocks
        for seat, length, end in zip(seats, step.lengths, step.ends, strict=True):
            passed = max(0, (end - length) // size - window_blocks) if window_blocks else 0
            yield from map(BlockId, seat.table[passed:])

    @torch.inference_mode()
    def serve(self) -> None:
        """In a rank of a group other than 0: computes its share of the steps of rank 0, until the group is broken."""
        layers, arena = self._arena.layers, self._arena.on_device
        if isinstance(self._arena, RankArena):
            self._arena.serve(self._decoder, self._mark)
        elif isinstance(self._decoder, NativeLlamaDecoder):
            self._decoder.serve(layers, arena)
        elif isinstance(self._decoder, GptDecoder) and isinstance(self._decoder.ranks, GptTeam):
            self._decoder.ranks.serve(self._decoder, layers, arena)

    def mirror(self, blocks: Sequence[int]) -> None:
        """In rank 0 of a group on several hosts: sends blocks, as they are now, to the other hosts."""
        decoder = self._decoder.ranks if isinstance(self._decoder, GptDecoder) else self._decoder
        if blocks and isinstance(decoder, NativeLlamaDecoder | GptTeam):
            decoder.mirror(self._arena.on_device, blocks)

    def check_device(self) -> None:
        """Computes something small: after some faults of a GPU, each further call of the process fails, too."""
        with self._current_device:
            torch.ones(1, device=self._device).add(1).item()

    def close(self) -> None:
        try:
            self._block_mover.wait_for_copies()
        finally:
            self._arena.close()
            self.__dict__.pop("block_memory", None)
            del self._block_mover, self._arena, self._decoder, self.graphs

    def _score(
        self, hidden: Tensor, scored: Sequence[KnownTokens], seats: Sequence[Seat]
    ) -> dict[int, list[TokenScore]]:
        result: dict[int, list[TokenScore]] = {}
        start = 0
        for known in scored:
            seat, position, last = seats[known.chunk], known.first, known.first + len(known.tokens)
            result[known.chunk] = scores = []
            while position < last:
                part_end = seat.num_prompt if position < seat.num_prompt else last
                end = min(part_end, last, position + ROWS_SCORED_AT_ONCE)
                targets = known.tokens[position - known.first : end - known.first].tolist()
                is_output = position >= seat.num_prompt
                count = num_top(seat.params) if is_output else seat.params.prompt_logprobs or 0
                plain = not (is_output and is_adjusted(seat.before(position)))  # then the rest of it is, too
                wanted = self._asking.wanted_scores(targets, count) if self._asking is not None and plain else None
                logits = self._logits(hidden[start : start + end - position], wanted)
                if not is_output:
                    scores += self._sampler.score(logits, targets, count)
                else:
                    scores += self._sampler.score_output(logits, seat, position, targets)
                start += end - position
                position = end
        return result


def _wanted_rows(step: StepInput) -> _LogitRows:
    wanted = _LogitRows()
    for token in step.sample_tokens:
        if not wanted.rows or wanted.rows[-1] != token:
            wanted.rows.append(token)
        wanted.sampled.append(len(wanted.rows) - 1)
    wanted.num_sampled = len(wanted.rows)
    firsts = list(accumulate(step.lengths, initial=0)) if step.scored else []
    for known in step.scored:
        start = step.ends[known.chunk] - step.lengths[known.chunk]
        # The token at position p is predicted by the row before it, which must be in this chunk.
        if known.first <= start:
            raise ValueError(f"cannot score position {known.first} in a chunk that starts at {start}")
        first = firsts[known.chunk] + known.first - 1 - start
        wanted.rows += range(first, first + len(known.tokens))
    wanted.num_scored = len(wanted.rows)
    wanted.rows += rows_of(step)
    return wanted
