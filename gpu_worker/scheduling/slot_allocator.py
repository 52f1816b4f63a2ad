"""Slots for the tokens of a step: new blocks at the end of tables, and blocks of one's own where they were shared."""

from collections import Counter

from gpu_worker.scheduling.preemption import Preemption
from gpu_worker.scheduling.sequence import Branch, Sequence
from gpu_worker.scheduling.step import Chunk
from gpu_worker.scheduling.workload import Workload, prefill_end


class SlotAllocator:
    """Takes blocks for chunks, by preempting others where it has to."""

    def __init__(self, work: Workload, preemption: Preemption) -> None:
        self._work = work
        self._preemption = preemption

    def secure(self, branch: Branch, now: float, *, forced: bool = False) -> bool:
        """Gives a decode a slot for its next token. False: it has to wait, or does not run any more."""
        work, blocks = self._work, self._work.blocks
        table = branch.blocks
        num_slots = branch.num_computed + 1
        index = branch.num_computed // work.info.block_size
        missing = max(0, blocks.blocks_for(num_slots) - len(table))
        shared = index < len(table) and not blocks.writable(table[index])
        if missing + shared > blocks.num_available and not self._preemption.make_room(
            branch, missing + shared, now, forced=forced
        ):
            return False
        if shared:
            self._own(branch, index)
        blocks.append(table, num_slots)
        branch.slots_end = len(table) * work.info.block_size
        return True

    def secure_beams(self, sequence: Sequence, now: float, *, forced: bool = False) -> bool:
        """The same for all beams of a search at once."""
        work, blocks = self._work, self._work.blocks
        beams = sequence.branches
        index = beams[0].num_computed // work.info.block_size
        num_slots = beams[0].num_computed + 1
        missing = sum(max(0, blocks.blocks_for(num_slots) - len(beam.blocks)) for beam in beams)
        users = Counter(beam.blocks[index] for beam in beams if index < len(beam.blocks))
        missing += sum(count - (blocks.refs[block] == count) for block, count in users.items())
        if missing > blocks.num_available and not self._preemption.make_room(beams[0], missing, now, forced=forced):
            return False
        for beam in beams:
            if index < len(beam.blocks) and not blocks.writable(beam.blocks[index]):
                self._own(beam, index)
            blocks.append(beam.blocks, num_slots)
        return True

    def prefill(self, branch: Branch, length: int, now: float, *, forced: bool = False) -> Chunk | None:
        """A chunk of up to `length` tokens, shorter if blocks are short. None: it has to wait, or runs no more."""
        work = self._work
        length = self._fit(branch, length)
        if not length:
            if not self._preemption.make_room(branch, 1, now, forced=forced):
                return None
            length = self._fit(branch, min(prefill_end(branch) - branch.num_computed, work.info.block_size))
        self._cover(branch, branch.num_computed + length)
        return Chunk(branch, branch.num_computed, length)

    def extend(self, chunk: Chunk, budget: int) -> int:
        """Lengthens a chunk by up to `budget` tokens if there are blocks left; by how many."""
        branch = chunk.branch
        wanted = min(prefill_end(branch) - branch.num_computed, chunk.length + budget)
        length = max(chunk.length, self._fit(branch, wanted))
        self._cover(branch, branch.num_computed + length)
        longer, chunk.length = length - chunk.length, length
        return longer

    def _fit(self, branch: Branch, length: int) -> int:
        """How many of the next `length` tokens the branch's blocks and the available ones can hold."""
        blocks = self._work.blocks
        num_slots = (len(branch.blocks) + blocks.num_available) * self._work.info.block_size
        return max(0, min(length, num_slots - branch.num_computed))

    def _cover(self, branch: Branch, num_slots: int) -> None:
        work = self._work
        work.blocks.append(branch.blocks, num_slots)
        branch.slots_end = len(branch.blocks) * work.info.block_size

    def _own(self, branch: Branch, index: int) -> None:
        self._work.blocks.make_writable(branch.blocks, index)
        self._work.protected.add(branch.sequence)
