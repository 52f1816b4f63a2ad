"""Where the tokens of a step are written: new blocks at the end of tables, and copies of blocks that were shared."""

from collections import Counter

from gpu_worker.scheduling.planning.preemption import Preemption
from gpu_worker.scheduling.state.block_tables import BlockTables
from gpu_worker.scheduling.state.sequence import Branch, Sequence
from gpu_worker.scheduling.state.step import Chunk


class SlotAllocator:
    """Gives branches the slots they need for a step, and has sequences preempted where blocks are short.

    `forced` is for the one branch that has to advance when no branch could: see preemption.
    """

    def __init__(self, tables: BlockTables, preemption: Preemption) -> None:
        self._tables = tables
        self._preemption = preemption

    def secure(self, branch: Branch, *, forced: bool = False) -> bool:
        """Gives a decode a slot for its next token. False: it has to wait, or no longer runs."""
        tables, blocks = self._tables, self._tables.device
        index = branch.num_computed // blocks.block_size

        def num_missing() -> int:
            return index >= len(branch.blocks) or not blocks.is_writable(branch.blocks[index])

        if not self._preemption.make_room(branch, num_missing, forced=forced):
            return False
        if index < len(branch.blocks) and not blocks.is_writable(branch.blocks[index]):
            tables.make_writable(branch, index)
        tables.grow_table(branch, branch.num_computed + 1)
        return True

    def secure_beams(self, sequence: Sequence, *, forced: bool = False) -> bool:
        """Gives every beam of a search a slot for its next token. False: the search waits, or no longer runs."""
        tables, blocks = self._tables, self._tables.device
        beams = sequence.branches
        index = beams[0].num_computed // blocks.block_size
        num_slots = beams[0].num_computed + 1
        missing = sum(max(0, blocks.blocks_for(num_slots) - len(beam.blocks)) for beam in beams)
        users = Counter(beam.blocks[index] for beam in beams if index < len(beam.blocks))
        missing += sum(count - (blocks.refs[block] == count) for block, count in users.items())
        if not self._preemption.make_room(beams[0], lambda: missing, forced=forced):
            return False
        for beam in beams:
            if index < len(beam.blocks) and not blocks.is_writable(beam.blocks[index]):
                tables.make_writable(beam, index)
            tables.grow_table(beam, num_slots)
        return True

    def prefill(self, branch: Branch, length: int, *, forced: bool = False) -> Chunk | None:
        """A chunk of up to `length` tokens, shorter if blocks are short. None: it waits, or no longer runs."""
        length = self._fit(branch, length)
        if not length:
            if not self._preemption.make_room(branch, lambda: 1, forced=forced):
                return None
            length = self._fit(branch, min(branch.prefill_end - branch.num_computed, self._tables.device.block_size))
        self._tables.grow_table(branch, branch.num_computed + length)
        return Chunk(branch, branch.num_computed, length)

    def extend(self, chunk: Chunk, budget: int) -> int:
        """Lengthens a chunk by up to `budget` tokens, as far as there are blocks. Returns by how many."""
        branch = chunk.branch
        wanted = min(branch.prefill_end - branch.num_computed, chunk.length + budget)
        length = max(chunk.length, self._fit(branch, wanted))
        self._tables.grow_table(branch, branch.num_computed + length)
        longer, chunk.length = length - chunk.length, length
        return longer

    def _fit(self, branch: Branch, length: int) -> int:
        """How many of the next `length` tokens the branch's blocks and the available ones can hold."""
        blocks = self._tables.device
        num_slots = (len(branch.blocks) + blocks.num_available) * blocks.block_size
        return max(0, min(length, num_slots - branch.num_computed))
