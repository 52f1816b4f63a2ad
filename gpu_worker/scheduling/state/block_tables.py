"""The block tables of all branches, on the device and in the host pool, and what the step being planned does to them.

A branch's `blocks`, `host_blocks`, `hashes`, `num_sealed`, `num_passed` and `slots_end` change only here.

If every layer of the model has a window, a branch gives back its leading blocks as soon as no later token of it sees
them: it has *passed* them. Places in `blocks` are positions, so they stay, with ids that are never read: kernels read
the blocks of a window only. A host table begins with the first block that has not been passed.

Two sets of sequences are kept until the step being planned is over:

    written       The step copies something into their blocks. The plan may not move these out, because a step copies
                  to the host pool before it makes any other copy.
    moving_out    The step copies their blocks to the host pool. The plan may not move these back, because a host block
                  that is given back before the step is not written.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from gpu_worker.blocks.block_manager import BlockManager
from gpu_worker.blocks.host_pool import HostPool, HostTier
from gpu_worker.blocks.prefix_cache import PrefixCache
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.scheduling.state.sequence import Branch, Sequence
from gpu_worker.scheduling.state.step import StepPlan
from gpu_worker.steps.runner import RunnerInfo
from octavo.request.hashing import block_hash
from octavo.request.ids import BlockHash, BlockId, HostBlockId

UNREAD = BlockId(0)  # stands in a table for a block that was passed before the branch began


class CachedPrefix(NamedTuple):
    """The blocks that a branch can begin its table with: those on the device, then those to be promoted."""

    device: list[BlockId]
    host: list[HostBlockId]

    @property
    def num_blocks(self) -> int:
        return len(self.device) + len(self.host)


class BlockTables:
    def __init__(self, config: SchedulerConfig, info: RunnerInfo) -> None:
        self.cache = PrefixCache(enabled=config.prefix_caching)
        self.device = BlockManager(
            info.num_blocks, info.block_size, cache=self.cache, watermark=config.watermark, debug=config.debug
        )
        self.host = HostPool(info.num_host_blocks)
        self.tier = HostTier(self.cache, self.host, enabled=config.host_tier)
        self._block_size = info.block_size
        self._window_blocks = info.window_blocks
        self._debug = config.debug
        self.left_seats: list[int] = []  # of branches that the runner does not know yet to have no blocks any more
        self.written: set[Sequence] = set()
        self.moving_out: set[Sequence] = set()

    # On the device

    def grow_table(self, branch: Branch, num_slots: int) -> None:
        """Adds blocks until the branch has `num_slots` slots. Raises OutOfBlocks and adds none if there are too few."""
        self.device.grow_table(branch.blocks, num_slots)
        branch.slots_end = len(branch.blocks) * self._block_size

    def give_back_unused(self, branch: Branch) -> None:
        """Takes back blocks for drafts that the branch has not got: those after the slot of its last token."""
        end = self.device.blocks_for(branch.num_computed + 1)
        if len(branch.blocks) > end:
            self.device.release(branch.blocks[end:])
            del branch.blocks[end:]
            branch.slots_end = end * self._block_size
            branch.told_blocks = min(branch.told_blocks, end)

    def make_writable(self, branch: Branch, index: int) -> None:
        """Replaces a shared block of the branch by a copy that the step being planned makes."""
        self.device.make_writable(branch.blocks, index)
        branch.told_blocks = min(branch.told_blocks, index)
        self.written.add(branch.sequence)

    def fork_table(self, parent: Branch, child: Branch) -> None:
        """Gives the child the parent's computed blocks; either of them copies a shared block before it writes to it."""
        child.blocks = parent.blocks[: parent.num_passed] + self.device.share(self.computed_blocks(parent))
        child.num_computed, child.num_sealed = parent.num_computed, parent.num_sealed
        child.num_passed = parent.num_passed
        child.hashes = parent.hashes.copy()
        child.slots_end = parent.slots_end = 0

    def release(self, branch: Branch) -> None:
        """Takes back all blocks of the branch, on device and host. Afterwards none of its tokens counts as computed."""
        if branch.blocks:
            held = self.held_blocks(branch)
            self.host.cancel_copies_in(block for block in held if self.device.is_writable(block))
            self.device.release(held)
            branch.blocks.clear()
        if branch.host_blocks:
            self.host.release(branch.host_blocks)
        if branch.seat >= 0:
            self.left_seats.append(branch.seat)
            branch.seat = branch.told_tokens = -1
        branch.num_computed = branch.num_sealed = branch.num_passed = branch.slots_end = 0

    def has_own_slot(self, branch: Branch) -> bool:
        """Whether the branch's next token has a slot in a block that no other table has."""
        index = branch.num_computed // self._block_size
        return index < len(branch.blocks) and self.device.is_writable(branch.blocks[index])

    def computed_blocks(self, branch: Branch) -> list[BlockId]:
        """The blocks that the branch holds with keys and values of earlier steps; the last one may be part-filled."""
        return branch.blocks[branch.num_passed : self.device.blocks_for(branch.num_computed)]

    def held_blocks(self, branch: Branch) -> list[BlockId]:
        """The blocks on the device that the branch holds: all of its table but those that it has passed."""
        return branch.blocks[branch.num_passed :]

    # Windows

    def num_passed(self, num_computed: int) -> int:
        """How many leading blocks a branch has passed whose first `num_computed` tokens are computed."""
        if not self._window_blocks:
            return 0
        return max(0, num_computed // self._block_size - self._window_blocks)

    def num_missing(self, num_tokens: int, num_blocks: int, num_passed: int, *, chunk: int = 1) -> int:
        """How many blocks more a branch holds, at its most, before it has computed its first `num_tokens` tokens.

        Its table has `num_blocks` blocks now, of which it has passed `num_passed`. With a window it computes the rest
        in chunks of at most `chunk` tokens, and gives blocks back after each.
        """
        missing = self.device.blocks_for(num_tokens) - num_blocks
        if self._window_blocks:
            at_once = self._window_blocks + self.device.blocks_for(chunk - 1) + 1
            missing = min(missing, at_once - (num_blocks - num_passed))
        return max(0, missing)

    # Prefixes

    def hashes_of(self, branch: Branch, num_blocks: int) -> list[BlockHash]:
        """The hashes of the first `num_blocks` blocks, all of which have to be full of known tokens."""
        hashes, size, root = branch.hashes, self._block_size, branch.sequence.root
        for index in range(len(hashes), num_blocks):
            parent = hashes[-1] if hashes else b""
            start, end = index * size, (index + 1) * size
            hashes.append(block_hash(root, parent, branch.tokens[start:end], branch.sequence.shown(start, end)))
        return hashes if len(hashes) == num_blocks else hashes[:num_blocks]

    def cached_blocks(self, branch: Branch, num_blocks: int) -> list[BlockId]:
        """The longest run of the branch's first `num_blocks` blocks that the prefix cache knows."""
        return self.cache.match(self.hashes_of(branch, num_blocks)) if self.cache.enabled else []

    def demoted_blocks(self, branch: Branch, start: int, num_blocks: int) -> list[HostBlockId]:
        """The longest run of the branch's blocks from `start` on, within its first `num_blocks`, that is demoted."""
        return self.tier.match(self.hashes_of(branch, num_blocks)[start:]) if self.tier.enabled else []

    def share_prefix(self, branch: Branch, prefix: CachedPrefix) -> None:
        """Begins the branch's table with blocks in which its first tokens are computed.

        The step being planned copies the demoted ones into new blocks. There must be room for those. They are offered
        to the prefix cache as blocks are that the branch has computed itself.
        """
        num_shared = branch.num_sealed = len(prefix.device)
        branch.num_computed = prefix.num_blocks * self._block_size
        branch.num_passed = passed = self.num_passed(branch.num_computed)
        branch.blocks = prefix.device[:passed] + self.device.share(prefix.device[passed:])
        if not prefix.host:
            return
        branch.blocks += [UNREAD] * (passed - len(branch.blocks))
        first = max(passed, num_shared)
        promoted = [self.device.take_block() for _ in range(first, prefix.num_blocks)]
        self.tier.promote(branch.hashes[first : prefix.num_blocks], promoted)
        branch.blocks += promoted
        self.written.add(branch.sequence)

    def add_tail(self, branch: Branch, blocks: list[BlockId], num_computed: int) -> None:
        """Ends a table of full blocks with one that is not full and that no other table has."""
        branch.blocks += blocks
        branch.num_computed = num_computed
        branch.slots_end = len(branch.blocks) * self._block_size

    def tail_name(self, branch: Branch, num_blocks: int, num_tokens: int) -> BlockHash:
        """By what a standby knows the block after so many full ones, with so many tokens in it."""
        parent = self.hashes_of(branch, num_blocks)[-1] if num_blocks else b""
        start = num_blocks * self._block_size
        end = start + num_tokens
        return block_hash(branch.sequence.root, parent, branch.tokens[start:end], branch.sequence.shown(start, end))

    def take_kept_tail(self, branch: Branch, end: int) -> None:
        """Ends a table of full blocks with the longest tail of a standby that is here and has no token after `end`."""
        start = branch.num_computed
        for num_tokens in range(min(self._block_size - 1, end - start), 0, -1) if self.cache.tails else ():
            name = self.tail_name(branch, len(branch.blocks), num_tokens)
            if (block := self.device.take_tail(name)) is not None:
                self.add_tail(branch, [block], start + num_tokens)
                return

    def seal_blocks(self, branch: Branch) -> None:
        """Offers the blocks that are full and computed now to the prefix cache, and gives back those passed now."""
        first, end = max(branch.num_sealed, branch.num_passed), branch.num_computed // self._block_size
        branch.num_sealed = end
        if self.cache.enabled:
            hashes = self.hashes_of(branch, end)
            for index in range(first, end):
                self.device.seal_block(hashes[index], branch.blocks[index])
        passed = self.num_passed(branch.num_computed)
        if passed > branch.num_passed:
            self.device.release(branch.blocks[branch.num_passed : passed])
            branch.num_passed = passed

    # To and from the host pool

    def move_out(self, sequence: Sequence, branches: Collection[Branch]) -> None:
        """Moves the computed blocks of the sequence's branches to the host pool.

        Raises OutOfBlocks, and moves nothing, if they do not fit there.
        """
        computed = [self.computed_blocks(branch) for branch in branches]
        self.tier.make_room(len({block for table in computed for block in table}))
        tables = self.host.copy_out(computed)
        for branch, table in zip(branches, tables, strict=True):
            num_computed, num_passed = branch.num_computed, branch.num_passed
            self.release(branch)
            branch.host_blocks, branch.num_computed, branch.num_passed = table, num_computed, num_passed
        self.moving_out.add(sequence)

    def destinations_of(self, branches: Iterable[Branch]) -> dict[HostBlockId, BlockId | None]:
        """Where each host block of the branches goes: a device block with the same content, or None for a new block."""
        destinations: dict[HostBlockId, BlockId | None] = {}
        for branch in branches:
            num_known = branch.num_computed // self._block_size if self.cache.enabled else 0
            hashes = self.hashes_of(branch, num_known)
            for index, host in enumerate(branch.host_blocks, branch.num_passed):
                if destinations.get(host) is None:
                    destinations[host] = self.cache.find(hashes[index]) if index < num_known else None
        return destinations

    def move_in(
        self, sequence: Sequence, branches: Iterable[Branch], destinations: dict[HostBlockId, BlockId | None]
    ) -> None:
        """Moves branches to the device: to blocks that `destinations_of` found, and to new ones. There must be room."""
        device, host_pool = self.device, self.host
        held = device.share(block for block in destinations.values() if block is not None)
        targets: dict[HostBlockId, BlockId] = {}
        for host, found in destinations.items():
            if found is None:
                block = device.take_block()
                held.append(block)
                host_pool.copy_in(host, block)
                targets[host] = block
            else:
                targets[host] = found
        for branch in branches:
            shared = device.share(targets[host] for host in branch.host_blocks)
            branch.blocks = shared[:1] * branch.num_passed + shared
            host_pool.release(branch.host_blocks)
            branch.slots_end = 0
        device.release(held)
        self.written.add(sequence)

    # The step being planned

    @property
    def moves(self) -> bool:
        return bool(self.host.has_copies_in or self.host.has_copies_out)

    def add_moves(self, plan: StepPlan) -> None:
        """Writes into the plan what the step has to move before it runs anything."""
        plan.input.swap_out = self.host.copies_out()
        plan.input.swap_in = self.host.copies_in()
        plan.input.copies = self.device.copies()
        if self._debug:
            plan.input.spoil = self.device.take_freed_blocks()

    def end_step(self, *, done: bool) -> None:
        """Forgets the moves of the planned step, which is `done` or failed."""
        self.tier.end_step(done=done)
        self.device.end_step()
        self.host.end_step()
        self.written.clear()
        self.moving_out.clear()

    def forget(self, sequence: Sequence) -> None:
        self.written.discard(sequence)
        self.moving_out.discard(sequence)

    def check_tables(self, branches: Collection[Branch]) -> None:
        """Recounts all blocks from the tables of all branches; raises AssertionError with what is wrong."""
        self.device.check_blocks(self.held_blocks(branch) for branch in branches)
        demoted = list(self.cache.on_host.values())
        self.host.check_host_blocks([*(branch.host_blocks for branch in branches), demoted])
        self.tier.check_tier()
