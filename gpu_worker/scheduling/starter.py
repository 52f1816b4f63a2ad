"""Bringing sequences onto the device: swapped ones back from the host pool, waiting ones through the prefix cache."""

from enum import Enum

from gpu_worker.scheduling.preemption import Preemption
from gpu_worker.scheduling.sequence import Branch, Sequence
from gpu_worker.scheduling.slot_allocator import SlotAllocator
from gpu_worker.scheduling.step import Chunk
from gpu_worker.scheduling.workload import RUNNING, SWAPPED, WAITING, Workload, prefill_end
from octavo.errors import OutOfBlocks
from octavo.ids import BlockId, HostBlockId

MAX_SKIPPED = 64  # sequences passed over in one step because they cannot start just now


class StartOutcome(Enum):
    STARTED = "started"
    SKIP = "skip"  # not now, but others may
    FULL = "full"  # no room: nobody behind it may overtake


class Starter:
    """Starts branches when blocks, rows and the limits on prompts allow."""

    def __init__(self, work: Workload, preemption: Preemption) -> None:
        self._work = work
        self._preemption = preemption
        self._slots = SlotAllocator(work, preemption)

    # Swapped

    def swap_in(self, only: Sequence | None, now: float) -> None:
        """Brings swapped sequences back, the first ranked first, as long as there is room."""
        for sequence in list(self._work.swapped):
            if sequence.hold_until > now or (sequence is not only if only is not None else sequence.lonely):
                continue
            fits = self.bring_in(sequence)
            sequence.starved = sequence.lonely and not fits
            if not fits:
                break

    def bring_in(self, sequence: Sequence) -> bool:
        """Moves a swapped sequence to the device if it fits beside the others."""
        work = self._work
        if sequence in work.moved_out:
            return False
        branches = [branch for branch in sequence.branches if branch.state is SWAPPED]
        places = self._places(branches)
        num_new = sum(1 for block in places.values() if block is None)
        hits = [block for block in places.values() if block is not None]
        spare = self._spare() + len(branches) if work.active else 0
        rows = self._num_rows() + self._rows_of(sequence, len(branches))
        if rows > work.config.max_batch_sequences and work.active:
            return False
        if not work.blocks.has_room_for(num_new, hits, spare=spare):
            return False
        held = work.blocks.share(hits)
        for host, found in places.items():
            if found is None:
                places[host] = block = work.blocks.take()
                held.append(block)
                work.host.copy_in(host, block)
        for branch in branches:
            blocks = [places[host] for host in branch.host_blocks]
            branch.blocks = work.blocks.share(block for block in blocks if block is not None)
            work.host.release(branch.host_blocks)
            branch.slots_end = 0
            work.run(branch)
        work.blocks.release(held)
        work.unswap(sequence)
        work.protected.add(sequence)
        return True

    def bring_back(self, sequence: Sequence) -> int:
        """Brings in on request, however long it was to stay out; how many blocks come."""
        work = self._work
        if not sequence.swapped:
            return 0
        num_blocks = len({block for branch in sequence.branches for block in branch.host_blocks})
        sequence.hold_until = float("-inf")
        if sequence in work.moved_out:  # the copy out is still to be made: the next step brings it back
            return num_blocks
        if not self.bring_in(sequence):
            raise OutOfBlocks(
                f"sequence {sequence.seq_id}: {num_blocks} blocks needed, {work.blocks.num_available} to be had; "
                "it comes back when there is room"
            )
        return num_blocks

    def _places(self, branches: list[Branch]) -> dict[HostBlockId, BlockId | None]:
        """Where each host block goes: a device block that still has its content, or None for a new one."""
        work = self._work
        places: dict[HostBlockId, BlockId | None] = {}
        for branch in branches:
            known = branch.num_computed // work.info.block_size if work.config.prefix_caching else 0
            hashes = work.extend_hashes(branch, known)
            for index, host in enumerate(branch.host_blocks):
                if places.get(host) is None:
                    places[host] = work.cache.find(hashes[index]) if index < known else None
        return places

    # Waiting

    def start(self, only: Sequence | None, budget: int, share: int, under_way: list[Chunk], now: float) -> list[Chunk]:
        """Starts waiting branches in order and gives each its first chunk."""
        work = self._work
        if only is None and any(sequence.starved for sequence in work.loners):
            return []
        swapped = (other for other in work.swapped if other.hold_until <= now and not other.lonely)
        first_swapped = next(swapped, None) if only is None else None
        chunks: list[Chunk] = []
        skipped = 0
        for sequence in list(work.waiting):
            if sequence is not only if only is not None else sequence.lonely:
                continue
            if first_swapped is not None and work.key(first_swapped) < work.key(sequence):
                break
            verdict = StartOutcome.STARTED
            while verdict is StartOutcome.STARTED and sequence.queued and budget > 0:
                verdict, chunk = self._start(sequence, budget, share, under_way + chunks, now)
                if chunk is not None:
                    chunks.append(chunk)
                    budget -= chunk.length
            sequence.starved = verdict is StartOutcome.FULL and sequence.lonely
            skipped += verdict is StartOutcome.SKIP
            if verdict is StartOutcome.FULL or budget <= 0 or skipped > MAX_SKIPPED:
                break
        return chunks

    def _start(
        self, sequence: Sequence, budget: int, share: int, chunks: list[Chunk], now: float
    ) -> tuple[StartOutcome, Chunk | None]:
        work = self._work
        branch = self._next_branch(sequence, now)
        if branch is None:
            return StartOutcome.SKIP, None
        hits = self._hits(branch)
        if self._being_computed(branch, len(hits)):
            return StartOutcome.SKIP, None
        left = prefill_end(branch) - len(hits) * work.info.block_size
        length = self._first_length(left, budget, share)
        verdict = self._limits(left, length, bool(chunks), chunks)
        if verdict is not StartOutcome.STARTED:
            return verdict, None
        while not self._has_room(branch, hits):
            if not self._displace(sequence, now):
                return StartOutcome.FULL, None
            hits = self._hits(branch)
        branch.blocks = work.blocks.share(hits)
        branch.num_sealed = len(hits)
        branch.num_cached = branch.num_computed = len(hits) * work.info.block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(branch.num_cached, branch.num_prompt)
        work.run(branch)
        if sequence.fan_out or all(other.state is not WAITING for other in sequence.branches):
            work.dequeue(sequence)
        if branch not in work.prefilling:
            return StartOutcome.STARTED, None
        chunk = self._slots.prefill(branch, length, now)
        return (StartOutcome.STARTED if chunk else StartOutcome.FULL), chunk

    def _next_branch(self, sequence: Sequence, now: float) -> Branch | None:
        """The branch to start: the first that waits, unless it had better wait for the prompt that another computes."""
        work = self._work
        branch = next(branch for branch in sequence.branches if branch.state is WAITING)
        if sequence not in work.active:
            return branch
        if sequence.beams is None and now - sequence.last_shed < work.config.min_preempt_interval_s:
            return None
        full = branch.num_prompt - branch.num_prompt % work.info.block_size
        if any(other.state is RUNNING and other.num_computed < full for other in sequence.branches):
            return None
        return branch

    def _hits(self, branch: Branch) -> list[BlockId]:
        """Computed blocks of its tokens that it can use."""
        work = self._work
        num_blocks = self._num_shareable(branch)
        hits = work.cache.match(work.extend_hashes(branch, num_blocks)) if work.config.prefix_caching else []
        for other in branch.sequence.branches:  # the prompt that another branch has, whatever became of the cache
            if other.state is RUNNING:
                shared = min(num_blocks, min(other.num_computed, branch.num_prompt) // work.info.block_size)
                hits = max(hits, other.blocks[:shared], key=len)
        return hits

    def _num_shareable(self, branch: Branch) -> int:
        """Blocks it may have from others: at least one token, and whatever is to be scored, is left to be computed."""
        num_tokens = min(prefill_end(branch), len(branch.tokens) - 1, branch.num_scored - 1)
        return num_tokens // self._work.info.block_size

    def _being_computed(self, branch: Branch, index: int) -> bool:
        """Whether a prompt under way computes the block that the branch needs next: once is enough for both.

        Nobody waits for a lower class, or for one that runs alone.
        """
        work = self._work
        if not work.config.prefix_caching or index >= self._num_shareable(branch):
            return False
        wanted, priority = branch.hashes[index], branch.sequence.priority
        return any(
            other.num_sealed <= index < len(other.hashes)
            and other.hashes[index] == wanted
            and (index + 1) * work.info.block_size <= prefill_end(other)
            and other.sequence.priority <= priority
            and not other.sequence.lonely
            for other in work.prefilling
        )

    def _first_length(self, left: int, budget: int, share: int) -> int:
        work = self._work
        crowded = len(work.prefilling) + len(work.waiting) > 1
        return min(left, budget, share if crowded and left > work.budget.long_prefill else left)

    def _limits(self, left: int, length: int, shared: bool, chunks: list[Chunk]) -> StartOutcome:
        """Whether one more prompt may be under way, if this chunk does not complete it."""
        config, budget = self._work.config, self._work.budget
        if length == left:
            return StartOutcome.STARTED
        if not config.chunked_prefill and shared and left <= budget.tokens:
            return StartOutcome.FULL  # it fits a step of its own
        ending = {chunk.branch for chunk in chunks if chunk.start + chunk.length == prefill_end(chunk.branch)}
        partial = [branch for branch in self._work.prefilling if branch not in ending]
        if len(partial) >= config.max_partial_prefills:
            return StartOutcome.SKIP
        num_long = sum(prefill_end(branch) - branch.num_computed > budget.long_prefill for branch in partial)
        if left > budget.long_prefill and num_long >= config.max_long_partial_prefills:
            return StartOutcome.SKIP
        return StartOutcome.STARTED

    def _has_room(self, branch: Branch, hits: list[BlockId]) -> bool:
        work, sequence = self._work, branch.sequence
        num_waiting = 1 if not sequence.fan_out else len(sequence.branches)
        if work.active and self._num_rows() + self._rows_of(sequence, num_waiting) > work.config.max_batch_sequences:
            return False
        if not work.active or (len(work.active) == 1 and sequence in work.active):
            needed, spare = work.blocks.blocks_for(prefill_end(branch)), 0
        else:
            needed, spare = self._blocks_of(branch), self._spare()
        return work.blocks.has_room_for(needed - len(hits), hits, spare=spare)

    def _displace(self, sequence: Sequence, now: float) -> bool:
        """With the priority policy, the newest of a lower class gives way to one that waits."""
        work = self._work
        if work.config.policy != "priority":
            return False
        since = now - work.config.min_preempt_interval_s
        lower = [
            other
            for other in work.active
            if other.priority > sequence.priority and other.last_preempted <= since and other not in work.protected
        ]
        if not lower:
            return False
        self._preemption.preempt(max(lower, key=lambda other: other.rank), now)
        return True

    # Room

    def _num_rows(self) -> int:
        """Rows that those on the device sample, now or when their prompts are complete."""
        work = self._work
        beams = sum(sequence.params.beam_width for sequence in work.beams)
        prompts = (branch.sequence for branch in work.prefilling if branch.sequence.beams is None)
        return len(work.decodes) + beams + sum(self._rows_of(sequence, 1) for sequence in prompts)

    def _rows_of(self, sequence: Sequence, num_branches: int) -> int:
        if sequence.beams is not None:
            return 0 if sequence in self._work.beams else sequence.params.beam_width
        return len(sequence.branches) if sequence.fan_out else num_branches

    def _blocks_of(self, branch: Branch) -> int:
        """Blocks it needs until its next token, and those its forks write then."""
        work, sequence = self._work, branch.sequence
        forks = len(sequence.branches) - 1 if sequence.fan_out else 0
        if sequence.beams is not None and not branch.num_output:
            forks = sequence.params.beam_width - 1
        return work.blocks.blocks_for(len(branch.tokens)) + forks

    def _spare(self) -> int:
        """Blocks that are not to be given away: the watermark, and what prompts under way still need."""
        work = self._work
        promised = sum(max(0, self._blocks_of(branch) - len(branch.blocks)) for branch in work.prefilling)
        return work.blocks.num_watermark + promised
