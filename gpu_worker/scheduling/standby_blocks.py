"""Histories of running sequences that other workers are to have in their prefix caches, and those that are kept here.

A history is the blocks of one branch from the first one on, by their hashes. It grows as blocks are sealed. At the
owner of a sequence nothing is held for it: blocks that have left are not sent. At its buddy the blocks are idle ones of
the prefix cache, which are evicted after those that nobody asked to keep.

The block behind a history, its *tail*, is not full yet. Its first slots do not change any more, so its bytes can be
read while the sequence runs. At the buddy it is a block of the cache under a hash of the tokens in it; a branch that
begins with these tokens takes it out of the cache, and writes on in it.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from gpu_worker.scheduling.block_exchange import BlockExchange
from gpu_worker.scheduling.state.sequence import FINISHED, RUNNING, SUSPECT, Branch, Sequence
from gpu_worker.scheduling.state.workload import Workload
from octavo.request.errors import OutOfBlocks
from octavo.request.ids import BlockHash, BlockId, SequenceId


class HistoryKey(NamedTuple):
    """Names the history of a branch at its owner."""

    seq_id: SequenceId
    epoch: int
    branch: int


class SentBlock(NamedTuple):
    """A block of a branch, with the tokens that are computed in it: a full one, or the tail."""

    name: BlockHash  # of those tokens after the blocks before
    content: bytes  # of the whole block: what is behind those tokens means nothing


class LastBlocks(NamedTuple):
    """Those of a branch that its buddy has not got yet."""

    full: list[SentBlock]
    tail: SentBlock | None = None
    num_in_tail: int = 0  # tokens


class StandbyBlocks:
    """Block commands call it: it changes nothing but which blocks are idle, and in what order they are evicted."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._cache = workload.tables.cache
        self._block_size = workload.info.block_size
        self._exchange = BlockExchange(workload)

    # At the owner

    def histories(self, min_tokens: int, known: Mapping[HistoryKey, int]) -> dict[HistoryKey, list[BlockHash]]:
        """The histories that a standby is worth for, as far as computed: of sequences with `min_tokens` tokens or more.

        `known` says how many hashes the caller has; the further ones are returned.
        """
        found: dict[HistoryKey, list[BlockHash]] = {}
        for sequence in self._workload.sequences.values():
            if not self._can_replay(sequence):
                continue
            for branch in sequence.branches:
                begun = branch.num_sealed or branch.num_output  # one that was preempted keeps its history
                if branch.state is FINISHED or not begun or len(branch.tokens) < min_tokens:
                    continue
                key = HistoryKey(sequence.seq_id, sequence.epoch, branch.index)
                found[key] = branch.hashes[known.get(key, 0) : self._num_useful(branch)]
        return found

    def _can_replay(self, sequence: Sequence) -> bool:
        """Whether another worker could begin the sequence with its blocks."""
        if sequence.pooling is not None or sequence.search is not None or not sequence.holds.isdisjoint(SUSPECT):
            return False
        return not self._workload.info.window_blocks

    def _scores_again(self, branch: Branch) -> bool:
        """Whether a replay computes the output again, for what is told of it."""
        params = branch.sequence.params
        return params.ranked or params.logprobs is not None or params.prompt_logprobs is not None

    def _num_useful(self, branch: Branch) -> int:
        """How many sealed blocks a replay would use. It computes again whatever it has to score again."""
        params = branch.sequence.params
        if params.prompt_logprobs is not None and branch.index == 0:
            return 0
        if params.ranked or params.logprobs is not None:
            return min(branch.num_sealed, (branch.num_prompt - 1) // self._block_size)
        return branch.num_sealed

    def read_last(
        self, key: HistoryKey, first: int, num_blocks: int, least: int, read: Callable[[BlockId], bytes]
    ) -> LastBlocks:
        """Of a history of so many sealed blocks, those from `first` on, and the tail behind them.

        No tail with fewer than `least` tokens. Nothing if a replay would not use it, or if the content of a block
        changes with every token.
        """
        branch = self._find_running(key)
        if branch is None or self._scores_again(branch) or self._workload.info.keeps_state:
            return LastBlocks([])
        if branch.num_sealed < num_blocks:  # it computes again what it had before it was preempted
            return LastBlocks([])
        full = [SentBlock(branch.hashes[index], read(branch.blocks[index])) for index in range(first, num_blocks)]
        num_tokens = branch.num_computed - num_blocks * self._block_size
        if not max(1, least) <= num_tokens < self._block_size:
            return LastBlocks(full)
        name = self._workload.tables.tail_name(branch, num_blocks, num_tokens)
        return LastBlocks(full, SentBlock(name, read(branch.blocks[num_blocks])), num_tokens)

    def _find_running(self, key: HistoryKey) -> Branch | None:
        """The branch of a history, if it has its blocks here and its prompt is computed."""
        sequence = self._workload.sequences.get(key.seq_id)
        if sequence is None or sequence.epoch != key.epoch or not self._can_replay(sequence):
            return None
        running = (each for each in sequence.branches if each.state is RUNNING and each.num_output)
        return next((each for each in running if each.index == key.branch), None)

    # At the buddy

    def put_blocks(self, blocks: SequenceOf[SentBlock], write: Callable[[BlockId, bytes], None]) -> bool:
        """Takes in full blocks of histories that are kept. False: there is no room for them."""
        try:
            held = self._exchange.hold([[each.name for each in blocks]], to_keep=True)
        except OutOfBlocks:
            return False
        contents = dict(blocks)
        for wanted in held.wanted:
            write(held.block_of(wanted.index), contents[wanted.block_hash])
            self._exchange.seal(held, [wanted.index])
        self._exchange.release(held)
        return True

    def put_tail(self, tail: SentBlock, ended: SequenceOf[BlockHash], write: Callable[[BlockId, bytes], None]) -> bool:
        """Keeps a tail, and no longer others. False: there is no room for it."""
        for name in ended:
            self._workload.tables.device.drop_tail(name)
        try:
            held = self._exchange.hold([[tail.name]], to_keep=True)
        except OutOfBlocks:
            return False
        self._cache.stand_by([tail.name], [])
        for wanted in held.wanted:
            write(held.block_of(wanted.index), tail.content)
            self._cache.tails.add(tail.name)
            self._exchange.seal(held, [wanted.index])
        self._exchange.release(held)
        return True

    def keep(self, begun: SequenceOf[BlockHash], ended: SequenceOf[BlockHash]) -> None:
        """Keeps the blocks of further hashes, and no longer those of others, each in the order of their prefixes."""
        self._cache.stand_by(begun, ended)

    def num_known(self, histories: Iterable[SequenceOf[BlockHash]]) -> list[int]:
        """How many leading blocks of each history are here, on the device or in the host pool."""
        return [self._num_known(hashes) for hashes in histories]

    def _num_known(self, hashes: SequenceOf[BlockHash]) -> int:
        cache = self._cache
        for index, block_hash in enumerate(hashes):
            if cache.find(block_hash) is None and block_hash not in cache.on_host:
                return index
        return len(hashes)
