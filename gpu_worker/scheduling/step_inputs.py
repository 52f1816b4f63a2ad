"""Makes of a plan what a runner is given: the arrays of the step, and what the runner does not know yet of branches."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from gpu_worker.constraints.late_masks import LateMasks
from gpu_worker.constraints.matcher import Grammar
from gpu_worker.scheduling.state.pooling import Pooling
from gpu_worker.scheduling.state.sequence import Branch
from gpu_worker.scheduling.state.step import Chunk, StepPlan
from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.steps.mask import Mask
from gpu_worker.steps.pooling import PooledChunk
from gpu_worker.steps.step_input import KnownTokens, OpenedSeat, StepInput, TableChange, ints, longs
from octavo.pictures.picture import pack_pictures
from octavo.request.ids import BlockId


class StepInputs:
    """Fills the inputs of plans, and gives seats to branches."""

    def __init__(self, workload: Workload) -> None:
        self._left = workload.tables.left_seats
        self._block_size = workload.info.block_size
        self._encoder = workload.info.encoder
        self._free_seats: list[int] = []
        self._num_seats = 0
        self._executor = ThreadPoolExecutor(1, "masks")
        self._late: LateMasks | None = None  # of the step in flight

    def fill(self, plan: StepPlan) -> None:
        """Writes into the input what the plan's chunks run. The runner has to be given it, or the step be aborted."""
        step, num_decodes = plan.input, plan.num_decodes
        step.left = ints(self._left)
        self._free_seats += self._left
        self._left.clear()
        shift, mask = self._block_size.bit_length() - 1, self._block_size - 1
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        seats: list[int] = []
        branches: list[int] = []
        for chunk in plan.chunks[:num_decodes]:  # the steady state, kept lean
            branch, start = chunk.branch, chunk.start
            blocks = branch.blocks
            if branch.told_tokens != start or branch.told_blocks != len(blocks):
                self._tell(branch, start, step)
            branch.told_tokens = start + 1
            tokens.append(branch.tokens[start])
            positions.append(start)
            slots.append(blocks[start >> shift] << shift | start & mask)
            seats.append(branch.seat)
            branches.append(branch.index)
        ends = [position + 1 for position in positions]
        lengths = [1] * num_decodes
        sample_tokens = list(range(num_decodes))
        sample_seats = seats.copy()
        for number, chunk in enumerate(plan.chunks[num_decodes:], num_decodes):
            branch, start, end = chunk.branch, chunk.start, chunk.start + chunk.length
            if branch.told_tokens != start or branch.told_blocks != len(branch.blocks):
                self._tell(branch, start, step)
            branch.told_tokens = end
            tokens += branch.tokens[start:end]
            tokens += chunk.drafts
            positions += range(start, end)
            slots += self._slots(branch.blocks, start, end)
            seats.append(branch.seat)
            lengths.append(chunk.length)
            ends.append(end)
            last = len(tokens) - 1
            for draft, sample in enumerate(chunk.samples, -len(chunk.drafts)):
                sample_tokens.append(last + draft if chunk.drafts else last)
                sample_seats.append(branch.seat)
                branches.append(sample.index)
            if chunk.score_from >= 0:
                known = longs(branch.tokens[chunk.score_from : chunk.score_end])
                step.scored.append(KnownTokens(number, chunk.score_from, known))
            if branch.sequence.pooling is not None and (pooled := _pooled(number, chunk, branch.sequence.pooling)):
                step.pooled.append(pooled)
        step.num_decodes, step.num_drafted = num_decodes, plan.num_drafted
        step.tokens, step.positions, step.slots = longs(tokens), longs(positions), longs(slots)
        step.seats, step.lengths, step.ends = ints(seats), ints(lengths), ints(ends)
        step.sample_tokens, step.sample_seats = ints(sample_tokens), ints(sample_seats)
        step.sample_branches = ints(branches)
        self._mask(plan)

    def _mask(self, plan: StepPlan) -> None:
        """Gives a mask to each sample of a branch that has a grammar, computed beside the model: only a draw asks."""
        wanted: list[tuple[int, Branch, Grammar, Mask | None]] = []
        place = 0
        for chunk in plan.chunks:
            if (grammar := chunk.branch.sequence.grammar) is not None:
                for number, branch in enumerate(chunk.samples):
                    drafted = chunk.draft_masks[number - 1] if number and chunk.drafts else None
                    wanted.append((place + number, branch, grammar, drafted))
            place += len(chunk.samples)
        if wanted:
            work = partial(_masks_of, wanted, foresee=plan.foresees)
            plan.input.masks = self._late = LateMasks(self._executor, work)

    def end_step(self) -> None:
        """Waits until nothing of the step is computed any more. Matchers have one thread at a time."""
        if self._late is not None:
            self._late.wait()
            self._late = None

    def _tell(self, branch: Branch, start: int, step: StepInput) -> None:
        """Brings what the runner knows of a branch, up to its token at `start`, and what it has, to one."""
        if branch.seat < 0:
            branch.seat = self._free_seats.pop() if self._free_seats else self._num_seats
            self._num_seats = max(self._num_seats, branch.seat + 1)
        sequence = branch.sequence
        if branch.told_tokens != start:
            known, num_encoded = longs(branch.tokens[:start]), self._encoder.num_encoded(branch.num_prompt)
            step.opened.append(
                OpenedSeat(
                    *(branch.seat, sequence.params, branch.num_prompt, known, sequence.root, sequence.adapter),
                    *(pack_pictures(sequence.pictures), num_encoded),
                    longs(branch.tokens[:num_encoded] if start < num_encoded else ()),
                )
            )
            branch.told_blocks = 0
        first = branch.told_blocks
        step.tables.append(TableChange(branch.seat, first, ints(branch.blocks[first:])))
        branch.told_blocks = len(branch.blocks)

    def _slots(self, blocks: list[BlockId], start: int, end: int) -> list[int]:
        """Where the tokens [start, end) of a branch are written."""
        size = self._block_size
        slots: list[int] = []
        for index in range(start // size, -(-end // size)):
            first = blocks[index] * size
            slots += range(first + max(0, start - index * size), first + min(size, end - index * size))
        return slots


def _masks_of(wanted: list[tuple[int, Branch, Grammar, Mask | None]], *, foresee: int) -> dict[int, Mask]:
    size = wanted[0][2].mask_bytes  # of the model's vocabulary
    buffer, found = bytearray(len(wanted) * size), dict[int, Mask]()
    for row, (sample, branch, grammar, drafted) in enumerate(wanted):
        found[sample] = mask = Mask(buffer, size, row)
        if drafted is not None:
            mask.write(bytes(drafted))
            continue
        if branch.matcher is None:
            branch.matcher = grammar.matcher()
        branch.matcher.mask(branch.tokens, branch.num_prompt, mask, foresee=foresee)
    return found


def _pooled(number: int, chunk: Chunk, pooling: Pooling) -> PooledChunk | None:
    """What is wanted of a chunk's states; None: nothing of a piece of a prompt whose last token alone counts."""
    params = pooling.params
    if not params.needs_all_rows and chunk.start + chunk.length < len(chunk.branch.tokens):
        return None
    return PooledChunk(number, params.kind, ints(params.token_ids), pooling.total_before(chunk.start))
