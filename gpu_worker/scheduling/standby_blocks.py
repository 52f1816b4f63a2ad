"""Histories of running sequences that other workers are to have in their prefix caches, and those that are kept here.

A history is the blocks of one branch from the first one on, by their hashes. It grows as blocks are sealed. At the
owner of a sequence nothing is held for it: blocks that have left are not sent. At its buddy the blocks are idle ones of
the prefix cache, which are evicted after those that nobody asked to keep.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from gpu_worker.scheduling.state.sequence import FINISHED, SUSPECT, Branch, Sequence
from gpu_worker.scheduling.state.workload import Workload
from octavo.request.ids import BlockHash, SequenceId


class HistoryKey(NamedTuple):
    """Names the history of a branch at its owner."""

    seq_id: SequenceId
    epoch: int
    branch: int


class StandbyBlocks:
    """Block commands call it: it changes nothing but the order in which idle blocks are evicted."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._cache = workload.tables.cache
        self._block_size = workload.info.block_size

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

    def _num_useful(self, branch: Branch) -> int:
        """How many sealed blocks a replay would use. It computes again whatever it has to score again."""
        params = branch.sequence.params
        if params.prompt_logprobs is not None and branch.index == 0:
            return 0
        if params.ranked or params.logprobs is not None:
            return min(branch.num_sealed, (branch.num_prompt - 1) // self._block_size)
        return branch.num_sealed

    # At the buddy

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
