"""Which sequences come onto the device: swapped ones from the host pool, waiting ones with blocks of their prefix."""

from enum import Enum
from typing import NamedTuple

from gpu_worker.scheduling.preemption import Preemption
from gpu_worker.scheduling.sequence import RUNNING, SWAPPED, WAITING, Branch, Sequence
from gpu_worker.scheduling.slot_allocator import SlotAllocator
from gpu_worker.scheduling.step import Chunk
from gpu_worker.scheduling.step_budget import StepBudget
from gpu_worker.scheduling.workload import Workload
from octavo.errors import OutOfBlocks
from octavo.ids import BlockId

MAX_SKIPPED = 64  # how many sequences that cannot start just now a step passes over


class StartOutcome(Enum):
    STARTED = "started"
    SKIP = "skip"  # it cannot start now, but sequences behind it may
    FULL = "full"  # there is no room: no sequence behind it may overtake


class BranchStart(NamedTuple):
    """How the attempt to start a branch ended, and the first chunk of the branch if it has one."""

    outcome: StartOutcome
    chunk: Chunk | None = None


class Starter:
    """Starts branches when blocks, rows and the limits on prompts allow."""

    def __init__(self, workload: Workload, preemption: Preemption, slots: SlotAllocator, budget: StepBudget) -> None:
        self._workload = workload
        self._lists = workload.lists
        self._tables = workload.tables
        self._preemption = preemption
        self._slots = slots
        self._budget = budget
        self._block_size = workload.info.block_size

    # Swapped

    def swap_in(self, only: Sequence | None, now: float) -> None:
        """Brings swapped sequences back, the first in the queue first, as long as there is room."""
        for sequence in list(self._workload.swapped):
            if sequence.hold_until > now or (sequence is not only if only is not None else sequence.runs_alone):
                continue
            fits = self.bring_in(sequence, headroom=self._headroom(sequence, now))
            if sequence is self._workload.on_trial and sequence not in self._tables.moving_out:
                while not fits and self._displace(sequence, now):
                    fits = self.bring_in(sequence)
            sequence.starved = sequence.runs_alone and not fits
            if not fits:
                break

    def bring_in(self, sequence: Sequence, *, headroom: int = 0) -> bool:
        """Moves a swapped sequence to the device; False if it does not fit beside the others and `headroom` now."""
        work, tables = self._workload, self._tables
        if sequence in tables.moving_out:
            return False
        branches = [branch for branch in sequence.branches if branch.state is SWAPPED]
        places = tables.places_for(branches)
        num_new = sum(1 for block in places.values() if block is None)
        hits = [block for block in places.values() if block is not None]
        spare = self._spare() + len(branches) + headroom if work.active else 0
        rows = self._num_rows() + self._rows_of(sequence, len(branches))
        if rows > work.config.max_batch_sequences and work.active:
            return False
        if not tables.device.has_room_for(num_new, hits, spare=spare):
            return False
        work.move_in(sequence, places)
        return True

    def bring_back(self, sequence: Sequence) -> int:
        """Brings a sequence in on request, also before its time to stay out is over. Returns how many blocks come."""
        if not sequence.swapped:
            return 0
        num_blocks = len({block for branch in sequence.branches for block in branch.host_blocks})
        sequence.hold_until = float("-inf")
        if sequence in self._tables.moving_out:  # the copy out is still to be made: the next step brings it back
            return num_blocks
        if not self.bring_in(sequence):
            raise OutOfBlocks(
                f"sequence {sequence.seq_id}: {num_blocks} blocks needed, {self._tables.device.num_available} "
                "available; it comes back when there is room"
            )
        return num_blocks

    # Waiting

    def start(self, only: Sequence | None, budget: int, share: int, under_way: list[Chunk], now: float) -> list[Chunk]:
        """Starts waiting branches in order, and gives each its first chunk.

        `only` is the one sequence that the step is for, or None for all that share steps. `share` is how many tokens of
        the `budget` a long prompt may have. `under_way` are the chunks that the step has already.
        """
        work = self._workload
        if only is None and any(sequence.starved for sequence in work.loners):
            return []
        swapped = (other for other in work.swapped if other.hold_until <= now and not other.runs_alone)
        first_swapped = next(swapped, None) if only is None else None
        chunks: list[Chunk] = []
        num_skipped = 0
        for sequence in list(work.waiting):
            if sequence is not only if only is not None else sequence.runs_alone:
                continue
            if first_swapped is not None and first_swapped.rank < sequence.rank:
                break
            outcome = StartOutcome.STARTED
            while outcome is StartOutcome.STARTED and sequence.queued and budget > 0:
                outcome, chunk = self._start_branch(sequence, budget, share, under_way + chunks, now)
                if chunk is not None:
                    chunks.append(chunk)
                    budget -= chunk.length
            sequence.starved = outcome is StartOutcome.FULL and sequence.runs_alone
            num_skipped += outcome is StartOutcome.SKIP
            displaced = self._preemption.happened  # what it lost comes before sequences behind this one
            if outcome is StartOutcome.FULL or displaced or budget <= 0 or num_skipped > MAX_SKIPPED:
                break
        return chunks

    def _start_branch(
        self, sequence: Sequence, budget: int, share: int, chunks: list[Chunk], now: float
    ) -> BranchStart:
        """Starts the next branch of a sequence, with the cached blocks of its prefix, if room and limits allow."""
        work, tables = self._workload, self._tables
        branch = self._next_branch(sequence, now)
        if branch is None:
            return BranchStart(StartOutcome.SKIP)
        hits = self._hits(branch)
        if self._is_being_computed(branch, len(hits)):
            return BranchStart(StartOutcome.SKIP)
        left = branch.prefill_end - len(hits) * self._block_size
        length = self._first_length(left, budget, share)
        allowed = self._limit_prompts(left, length, chunks)
        if allowed is not StartOutcome.STARTED:
            return BranchStart(allowed)
        headroom = self._headroom(sequence, now)
        while not self._has_room(branch, hits, headroom):
            if not self._displace(sequence, now):
                return BranchStart(StartOutcome.FULL)
            hits = self._hits(branch)
        tables.share_prefix(branch, hits)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(branch.num_computed, branch.num_prompt)
        work.run(branch)
        if sequence.fan_out or all(other.state is not WAITING for other in sequence.branches):
            work.dequeue(sequence)
        if branch not in self._lists.prefilling:
            return BranchStart(StartOutcome.STARTED)
        chunk = self._slots.prefill(branch, length, now)
        return BranchStart(StartOutcome.STARTED if chunk else StartOutcome.FULL, chunk)

    def _next_branch(self, sequence: Sequence, now: float) -> Branch | None:
        """The first waiting branch. None while another branch computes the prompt, and soon after a branch gave way."""
        work = self._workload
        branch = next(branch for branch in sequence.branches if branch.state is WAITING)
        if sequence not in work.active:
            return branch
        if sequence.search is None and now - sequence.last_shed < work.config.min_preempt_interval_s:
            return None
        full = branch.num_prompt - branch.num_prompt % self._block_size
        if any(other.state is RUNNING and other.num_computed < full for other in sequence.branches):
            return None
        return branch

    def _hits(self, branch: Branch) -> list[BlockId]:
        """The longest run of computed blocks that the branch can begin its table with."""
        num_blocks = self._num_shareable(branch)
        hits = self._tables.cached_blocks(branch, num_blocks)
        for other in branch.sequence.branches:  # their prompt blocks, also if the cache has evicted them
            if other.state is RUNNING:
                shared = min(num_blocks, min(other.num_computed, branch.num_prompt) // self._block_size)
                if other.num_passed <= self._tables.num_passed(shared * self._block_size):
                    hits = max(hits, other.blocks[:shared], key=len)
        return hits

    def _num_shareable(self, branch: Branch) -> int:
        """How many blocks it may share. Its last token and every row that a score needs are left to compute."""
        num_tokens = min(branch.prefill_end, len(branch.tokens) - 1, branch.first_unscored - 1)
        return num_tokens // self._block_size

    def _is_being_computed(self, branch: Branch, index: int) -> bool:
        """Whether a prompt under way will compute the next block of the branch, so that the branch waits for it.

        A branch does not wait for a sequence that runs alone, or, with the priority policy, for one of a lower class.
        """
        work = self._workload
        if not work.config.prefix_caching or index >= self._num_shareable(branch):
            return False
        wanted, (own_class, _) = branch.hashes[index], branch.sequence.rank
        return any(
            other.num_sealed <= index < len(other.hashes)
            and other.hashes[index] == wanted
            and (index + 1) * self._block_size <= other.prefill_end
            and other.sequence.rank[0] <= own_class
            and not other.sequence.runs_alone
            for other in self._advancing()
        )

    def _advancing(self) -> list[Branch]:
        """The branches that compute their prompts, except those that pause for a trial."""
        on_trial = self._workload.on_trial
        return [branch for branch in self._lists.prefilling if on_trial in (None, branch.sequence)]

    def _first_length(self, left: int, budget: int, share: int) -> int:
        """How many of the `left` tokens of a prompt its first chunk has."""
        crowded = len(self._lists.prefilling) + len(self._workload.waiting) > 1
        return min(left, budget, share if crowded and left > self._budget.long_prefill else left)

    def _limit_prompts(self, left: int, length: int, chunks: list[Chunk]) -> StartOutcome:
        """Whether a prompt of `left` tokens may start with a chunk of `length`, as far as the limits on prompts go."""
        config, budget = self._workload.config, self._budget
        if length == left:
            return StartOutcome.STARTED
        if not config.chunked_prefill and chunks and left <= budget.tokens:
            return StartOutcome.FULL  # it waits for a step that holds it whole
        ending = {chunk.branch for chunk in chunks if chunk.start + chunk.length == chunk.branch.prefill_end}
        partial = [branch for branch in self._advancing() if branch not in ending]
        if len(partial) >= config.max_partial_prefills:
            return StartOutcome.SKIP
        num_long = sum(branch.prefill_end - branch.num_computed > budget.long_prefill for branch in partial)
        if left > budget.long_prefill and num_long >= config.max_long_partial_prefills:
            return StartOutcome.SKIP
        return StartOutcome.STARTED

    def _has_room(self, branch: Branch, hits: list[BlockId], headroom: int) -> bool:
        """Whether there are rows and blocks for the branch beside those that run; `hits` are the blocks it shares."""
        work, sequence, blocks = self._workload, branch.sequence, self._tables.device
        num_waiting = 1 if not sequence.fan_out else len(sequence.branches)
        passed = self._tables.num_passed(len(hits) * self._block_size)
        if work.active and self._num_rows() + self._rows_of(sequence, num_waiting) > work.config.max_batch_sequences:
            return False
        if not work.active or (len(work.active) == 1 and sequence in work.active):
            num_new, spare = self._tables.num_missing(branch.prefill_end, len(hits), passed), 0
        else:
            num_new, spare = self._still_needed(branch, len(hits), passed), self._spare() + headroom
        return blocks.has_room_for(num_new, hits[passed:], spare=spare)

    def _displace(self, sequence: Sequence, now: float) -> bool:
        """With the priority policy, preempts the newest sequence of the lowest class for a waiting higher one.

        For a sequence on trial, beside which nothing else runs, it preempts any other, with either policy.
        """
        work = self._workload
        if sequence is work.on_trial:
            lower = [other for other in work.active if other is not sequence]
        elif work.config.policy == "priority":
            lower = [other for other in work.active if other.priority > sequence.priority]
        else:
            return False
        victim = max(lower, key=lambda other: other.rank, default=None)
        if victim is None or victim in self._tables.written:
            return False
        self._preemption.preempt(victim, now)
        return True

    # Room

    def _num_rows(self) -> int:
        """Rows that the branches on the device sample, now or when their prompts are complete."""
        lists = self._lists
        beams = sum(sequence.params.beam_width for sequence in lists.searches)
        prompts = (branch.sequence for branch in lists.prefilling if branch.sequence.search is None)
        return len(lists.decodes) + beams + sum(self._rows_of(sequence, 1) for sequence in prompts)

    def _rows_of(self, sequence: Sequence, num_branches: int) -> int:
        """Rows that `num_branches` more branches of the sequence sample: all its branches if they are to fork."""
        if sequence.search is not None:
            return 0 if sequence in self._lists.searches else sequence.params.beam_width
        return len(sequence.branches) if sequence.fan_out else num_branches

    def _still_needed(self, branch: Branch, num_blocks: int, num_passed: int) -> int:
        """Blocks that the branch needs until its next token, and one for each branch that will fork from it.

        Its table has `num_blocks` blocks by then, of which it has passed `num_passed`.
        """
        sequence = branch.sequence
        forks = len(sequence.branches) - 1 if sequence.fan_out else 0
        if sequence.search is not None and not branch.num_output:
            forks = sequence.params.beam_width - 1
        chunk = self._workload.config.max_batch_tokens
        return self._tables.num_missing(len(branch.tokens), num_blocks, num_passed, chunk=chunk) + forks

    def _headroom(self, sequence: Sequence, now: float) -> int:
        """Blocks that a sequence preempted a moment ago must leave: one for each row, so that it runs on a while."""
        soon = now - sequence.last_preempted < self._workload.config.min_preempt_interval_s
        return self._num_rows() if soon else 0

    def _spare(self) -> int:
        """Blocks that a new branch must leave: the watermark, and what prompts under way still need."""
        prefilling = self._lists.prefilling
        promised = sum(self._still_needed(branch, len(branch.blocks), branch.num_passed) for branch in prefilling)
        return self._tables.device.num_watermark + promised
