"""Which sequences come onto the device: swapped ones from the host pool, waiting ones with blocks of their prefix."""

from enum import Enum

from gpu_worker.blocks.cost_model import CostModel
from gpu_worker.scheduling.planning.preemption import Preemption
from gpu_worker.scheduling.planning.slot_allocator import SlotAllocator
from gpu_worker.scheduling.state.block_tables import CachedPrefix
from gpu_worker.scheduling.state.room import Room
from gpu_worker.scheduling.state.scheduler_config import StepBudget
from gpu_worker.scheduling.state.sequence import (
    QUEUED,
    RUNNING,
    SWAPPED,
    WAITING,
    Branch,
    CarriedTail,
    Hold,
    Place,
    Sequence,
)
from gpu_worker.scheduling.state.step import Chunk
from gpu_worker.scheduling.state.workload import Workload
from octavo.request.errors import OutOfBlocks

MAX_SKIPPED = 64  # how many sequences that cannot start just now a step passes over


class StartOutcome(Enum):
    STARTED = "started"
    SKIP = "skip"  # it cannot start now, but sequences behind it may
    FULL = "full"  # there is no room: no sequence behind it may overtake


class Starter:
    """Starts branches when blocks, rows and the limits on prompts allow."""

    def __init__(
        self,
        workload: Workload,
        preemption: Preemption,
        slots: SlotAllocator,
        costs: CostModel,
        budget: StepBudget,
    ) -> None:
        self._workload = workload
        self._room = Room(workload)
        self._lists = workload.lists
        self._tables = workload.tables
        self._preemption = preemption
        self._slots = slots
        self._costs = costs
        self._budget = budget
        self._block_size = workload.info.block_size

    # Swapped

    def swap_in(self) -> None:
        """Brings swapped sequences back, the first in the queue first, as long as there is room.

        Each leaves room for the first sequence that waits before it, and none overtakes one that is starved.
        """
        work = self._workload
        if work.turn is None and work.has_starved:
            return
        for sequence in list(work.swapped):
            if sequence.kept_back or not work.may_run(sequence) or sequence in self._tables.moving_out:
                continue
            earlier = self._waits_before(sequence) if work.turn is None else None
            headroom = self._room.headroom(sequence)
            if earlier is not None:
                if not work.active and self._has_room(earlier, self._hits(earlier), 0):
                    break  # it starts in this step
                headroom += self._num_to_start(earlier)
            fits = self.bring_in(sequence, headroom=headroom, spare_rows=earlier is not None)
            while not fits and sequence is work.on_trial and self._displace(sequence):
                fits = self.bring_in(sequence)
            if not fits:
                self._note_starved(sequence)
                break

    def _note_starved(self, sequence: Sequence) -> None:
        if sequence.is_suspect and sequence.place is not Place.RUNNING:
            self._workload.hold(sequence, Hold.STARVED)

    def bring_in(self, sequence: Sequence, *, headroom: int = 0, spare_rows: int = 0) -> bool:
        """Moves a swapped sequence to the device; False if it does not fit beside the others and what it must leave."""
        work, tables = self._workload, self._tables
        if sequence in tables.moving_out:
            return False
        branches = [branch for branch in sequence.branches if branch.state is SWAPPED]
        destinations = tables.destinations_of(branches)
        num_new = sum(1 for block in destinations.values() if block is None)
        hits = [block for block in destinations.values() if block is not None]
        spare = self._room.spare() + len(branches) + headroom if work.active else 0
        if not self._room.has_rows_for(self._room.rows_of(sequence, len(branches)) + spare_rows):
            return False
        if not tables.device.has_room_for(num_new, hits, spare=spare):
            return False
        work.move_in(sequence, destinations)
        return True

    def _waits_before(self, sequence: Sequence) -> Branch | None:
        """The next branch of the first sequence that waits for its turn among others, if that is of a lower rank."""
        for waiting in self._workload.waiting:
            if not (waiting.kept_back or waiting.is_suspect):
                return next(b for b in waiting.branches if b.state is WAITING) if waiting.rank < sequence.rank else None
        return None

    def _num_to_start(self, branch: Branch) -> int:
        """How many of the available blocks a waiting branch needs until its next token."""
        hits = self._hits(branch)
        passed = self._tables.num_passed(hits.num_blocks * self._block_size)
        num_idle = sum(1 for block in hits.device[passed:] if not self._tables.device.refs[block])
        num_promoted = hits.num_blocks - max(passed, len(hits.device))
        return num_idle + num_promoted + self._room.still_needed(branch, hits.num_blocks, passed)

    def bring_back(self, sequence: Sequence) -> int:
        """Ends the hold on a sequence, and brings it in if there is room. Returns how many blocks come.

        Raises OutOfBlocks if there is no room: it is not held any more, and comes back in its turn.
        """
        self._workload.end_hold(sequence, Hold.REQUESTED)
        if sequence.place is not Place.SWAPPED:
            return 0
        num_blocks = len({block for branch in sequence.branches for block in branch.host_blocks})
        if sequence in self._tables.moving_out:  # the copy out is still to be made: the next step brings it back
            return num_blocks
        if not self.bring_in(sequence):
            raise OutOfBlocks(
                f"sequence {sequence.seq_id}: {num_blocks} blocks needed, {self._tables.device.num_available} "
                "available; it comes back when there is room"
            )
        return num_blocks

    # Moved here from another worker

    def resume(self, sequence: Sequence) -> bool:
        """Starts all branches of a waiting sequence whose computed blocks have come from another worker.

        A branch whose tail has come, too, computes nothing again. The tails of the others are given back.

        It overtakes those that wait, because it was running. False, and it waits in its turn as they do: a block of it
        is not on the device any more, there is no room for its next tokens, or it may not share steps now.
        """
        work, tables, room = self._workload, self._tables, self._room
        branches = [branch for branch in sequence.branches if branch.state is WAITING]
        prefixes = {branch: self._hits(branch) for branch in branches}
        tails = self._tails(sequence, branches)
        if sequence.is_suspect or work.has_starved:
            return False
        if any(len(hits.device) < self._num_shareable(branch) for branch, hits in prefixes.items()):
            return False
        shared = {block for hits in prefixes.values() for block in hits.device}
        num_blocks = {branch: len(hits.device) + (branch in tails) for branch, hits in prefixes.items()}
        num_new = sum(tables.num_missing(len(branch.tokens), num_blocks[branch], 0) for branch in branches)
        spare = room.spare() if work.active else 0
        if not (room.has_rows_for(len(branches)) and tables.device.has_room_for(num_new, shared, spare=spare)):
            return False
        for branch, hits in prefixes.items():
            tables.share_prefix(branch, hits)
            if branch in tails:
                tables.add_tail(branch, tails[branch].reservation.commit(), tails[branch].num_computed)
            work.run(branch)
        return True

    def _tails(self, sequence: Sequence, branches: list[Branch]) -> dict[Branch, CarriedTail]:
        """The tails that continue the full blocks of their branches. The others are given back."""
        found: dict[Branch, CarriedTail] = {}
        carried = dict(sequence.carried.tails) if sequence.carried else {}
        for branch in branches:
            tail = carried.get(branch.index)
            num_full = self._num_shareable(branch) * self._block_size
            if tail and tail.reservation.blocks and num_full < tail.num_computed < len(branch.tokens):
                found[branch] = carried.pop(branch.index)
        for tail in carried.values():
            tail.reservation.release()
        return found

    # Waiting

    def start(self, budget: int, share: int, under_way: list[Chunk]) -> list[Chunk]:
        """Starts waiting branches in order, and gives each its first chunk.

        `share` is how many tokens of the `budget` a long prompt may have. `under_way` are the chunks that the step has
        already.
        """
        work = self._workload
        if work.turn is None and work.has_starved:
            return []
        swapped = (other for other in work.swapped if not (other.kept_back or other.is_suspect))
        first_swapped = next(swapped, None) if work.turn is None else None
        chunks: list[Chunk] = []
        num_skipped = 0
        for sequence in list(work.waiting):
            if sequence.kept_back or not work.may_run(sequence):
                continue
            if first_swapped is not None and first_swapped.rank < sequence.rank:
                break
            outcome = StartOutcome.STARTED
            while outcome is StartOutcome.STARTED and sequence.place in QUEUED and budget > 0:
                outcome, chunk = self._start_branch(sequence, budget, share, under_way + chunks)
                if chunk is not None:
                    chunks.append(chunk)
                    budget -= chunk.length
            sequence.holds.discard(Hold.STARVED)
            if outcome is StartOutcome.FULL:
                self._note_starved(sequence)
            num_skipped += outcome is StartOutcome.SKIP
            displaced = self._preemption.happened  # what it lost comes before sequences behind this one
            if outcome is StartOutcome.FULL or displaced or budget <= 0 or num_skipped > MAX_SKIPPED:
                break
        return chunks

    def _start_branch(
        self, sequence: Sequence, budget: int, share: int, chunks: list[Chunk]
    ) -> tuple[StartOutcome, Chunk | None]:
        """Starts the next branch of a sequence, with the cached blocks of its prefix, if room and limits allow.

        Returns its first chunk, if it has one. A branch whose prefix is promoted has its first chunk in the next step,
        so that no step waits for the copies.
        """
        branch = self._next_branch(sequence)
        if branch is None:
            return StartOutcome.SKIP, None
        hits = self._hits(branch)
        ends = {len(hits.device), hits.num_blocks}  # another branch may promote the next block, too
        if any(self._is_being_computed(branch, end) for end in ends):
            return StartOutcome.SKIP, None
        left = branch.prefill_end - hits.num_blocks * self._block_size
        length = self._first_length(left, budget, share)
        allowed = self._limit_prompts(left, length, chunks)
        if allowed is not StartOutcome.STARTED:
            return allowed, None
        headroom = self._room.headroom(sequence)
        while not self._has_room(branch, hits, headroom):
            if not self._displace(sequence):
                return StartOutcome.FULL, None
            hits = self._hits(branch)
        self._tables.share_prefix(branch, hits)
        if not hits.host:
            self._tables.take_kept_tail(branch, self._end_shareable(branch))
            length = min(length, branch.prefill_end - branch.num_computed)
        if sequence.cached_tokens is None:
            num_given = self._workload.info.encoder.num_given(branch.num_prompt)
            sequence.note_cached(min(branch.num_computed, num_given))
        self._workload.run(branch)
        if hits.host or branch not in self._lists.prefilling:
            return StartOutcome.STARTED, None
        chunk = self._slots.prefill(branch, length)
        return StartOutcome.STARTED if chunk else StartOutcome.FULL, chunk

    def _next_branch(self, sequence: Sequence) -> Branch | None:
        """The first waiting branch. None while another branch computes the prompt, and soon after a branch gave way."""
        work = self._workload
        branch = next(branch for branch in sequence.branches if branch.state is WAITING)
        if sequence not in work.active:
            return branch
        if sequence.search is None and work.now - sequence.last_shed < work.config.min_preempt_interval_s:
            return None
        full = branch.num_prompt - branch.num_prompt % self._block_size
        if any(other.state is RUNNING and other.num_computed < full for other in sequence.branches):
            return None
        return branch

    def _hits(self, branch: Branch) -> CachedPrefix:
        """The longest run of computed blocks on the device, and after it the demoted ones that are worth a copy."""
        num_blocks = self._num_shareable(branch)
        hits = self._tables.cached_blocks(branch, num_blocks)
        for other in branch.sequence.branches:  # their prompt blocks, also if the cache has evicted them
            if other.state is RUNNING:
                shared = min(num_blocks, min(other.num_computed, branch.num_prompt) // self._block_size)
                if other.num_passed <= self._tables.num_passed(shared * self._block_size):
                    hits = max(hits, other.blocks[:shared], key=len)
        if self._costs.copy_is_cheaper(self._workload.info.bytes_per_block, self._block_size):
            return CachedPrefix(hits, self._tables.demoted_blocks(branch, len(hits), num_blocks))
        return CachedPrefix(hits, [])

    def _num_shareable(self, branch: Branch) -> int:
        """How many blocks it may share."""
        return self._end_shareable(branch) // self._block_size

    def _end_shareable(self, branch: Branch) -> int:
        """How many tokens may come from blocks. Its last one and rows that are needed themselves are computed."""
        pooling = branch.sequence.pooling
        if pooling is not None and pooling.params.needs_all_rows:
            return 0
        return min(branch.prefill_end, len(branch.tokens) - 1, branch.first_unscored - 1)

    def _is_being_computed(self, branch: Branch, index: int) -> bool:
        """Whether a prompt under way will compute the next block of the branch, so that the branch waits for it.

        A branch does not wait for a suspect, or, with the priority policy, for one of a lower class.
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
            and not other.sequence.is_suspect
            for other in self._advancing()
        )

    def _advancing(self) -> list[Branch]:
        """The branches that compute their prompts, except those that have to wait for the end of a trial."""
        on_trial = self._workload.on_trial
        return [branch for branch in self._lists.prefilling if on_trial in (None, branch.sequence)]

    def _first_length(self, left: int, budget: int, share: int) -> int:
        crowded = len(self._lists.prefilling) + len(self._workload.waiting) > 1
        return min(left, budget, share if crowded and left > self._budget.long_prefill else left)

    def _limit_prompts(self, left: int, length: int, chunks: list[Chunk]) -> StartOutcome:
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

    def _has_room(self, branch: Branch, hits: CachedPrefix, headroom: int) -> bool:
        """Whether there are rows and blocks for the branch beside those that run; it begins with `hits`."""
        work, sequence, blocks = self._workload, branch.sequence, self._tables.device
        num_waiting = 1 if not sequence.forks else len(sequence.branches)
        num_blocks = hits.num_blocks
        passed = self._tables.num_passed(num_blocks * self._block_size)
        if not self._room.has_rows_for(self._room.rows_of(sequence, num_waiting)):
            return False
        if not work.active or (len(work.active) == 1 and sequence in work.active):
            num_new, spare = self._tables.num_missing(branch.prefill_end, num_blocks, passed), 0
        else:
            num_new, spare = self._room.still_needed(branch, num_blocks, passed), self._room.spare() + headroom
        num_new += num_blocks - max(passed, len(hits.device))  # the promoted ones
        return blocks.has_room_for(num_new, hits.device[passed:], spare=spare)

    def _displace(self, sequence: Sequence) -> bool:
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
        victim = max((s for s in lower if s.place is not Place.FROZEN), key=lambda other: other.rank, default=None)
        if victim is None or victim in self._tables.written:
            return False
        self._preemption.preempt(victim)
        return True
