"""All sequences on this worker, where each is, and the blocks they have.

A sequence is in `waiting` while it has branches to start, in `active` while a branch of it has blocks on the device, in
`swapped` while they are in the host pool. Branches on the device are in exactly one of

    decodes      a reusable chunk per branch that needs one more token
    prefilling   known tokens are still to be computed
    beams        (whole sequences) beam search goes on in lockstep, once all beams are computed
"""

import sys
import time
from collections.abc import Callable

from gpu_worker.blocks.block_manager import BlockManager
from gpu_worker.blocks.prefix_cache import PrefixCache
from gpu_worker.blocks.swap import CostModel, HostPool
from gpu_worker.scheduling.policy import SchedulerConfig, WaitQueue, queue_key
from gpu_worker.scheduling.sequence import Branch, BranchState, Sequence
from gpu_worker.scheduling.step import Chunk, Delta, RunnerInfo
from gpu_worker.scheduling.step_budget import StepBudget
from octavo.hashing import block_hash
from octavo.ids import BlockHash, SequenceId
from octavo.sampling import FinishReason

RUNNING, WAITING, SWAPPED, FINISHED = (
    BranchState.RUNNING,
    BranchState.WAITING,
    BranchState.SWAPPED,
    BranchState.FINISHED,
)


def branch_rank(branch: Branch) -> tuple[int, int, int]:
    """Who keeps blocks when they are short: lower first."""
    return (*branch.sequence.rank, branch.index)


def prefill_end(branch: Branch) -> int:
    """Where its prefill ends: a beam under way leaves its last token to the step all beams take together."""
    behind = branch.sequence.beams is not None and len(branch.tokens) > branch.num_prompt
    return len(branch.tokens) - behind


class Workload:
    """The state that planning, preempting and committing share, and the moves that keep it whole."""

    def __init__(self, config: SchedulerConfig, info: RunnerInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.info = info
        self.clock = clock
        self.cache = PrefixCache(enabled=config.prefix_caching)
        self.blocks = BlockManager(
            info.num_blocks, info.block_size, cache=self.cache, watermark=config.watermark, debug=config.debug
        )
        self.host = HostPool(info.num_host_blocks)
        self.costs = CostModel()
        self.budget = StepBudget(config, info.block_size)
        self.sequences: dict[SequenceId, Sequence] = {}
        self.key = queue_key(config.policy)
        self.waiting = WaitQueue(self.key)
        self.swapped = WaitQueue(self.key)
        self.active: dict[Sequence, None] = {}
        self.decodes: list[Chunk] = []
        self.needy: list[Branch] = []  # decodes whose next token has no slot yet
        self.prefilling: list[Branch] = []
        self.beams: list[Sequence] = []
        self.loners: list[Sequence] = []  # to be run with no other in the step
        self.protected: set[Sequence] = set()  # blocks of theirs are written by copies of the step being planned
        self.moved_out: set[Sequence] = set()  # blocks of theirs are read by swaps of the step being planned
        self.pending: list[Delta] = []  # what happened between steps
        self.num_preempted_swap = 0
        self.num_preempted_recompute = 0

    # Queues

    def enqueue(self, sequence: Sequence) -> None:
        if not sequence.queued:
            sequence.queued = True
            self.waiting.add(sequence)

    def dequeue(self, sequence: Sequence) -> None:
        if sequence.queued:
            sequence.queued = False
            self.waiting.remove(sequence)

    def tidy(self) -> None:
        """Takes branches that have stopped running off the lists of those that run."""
        self.decodes = [chunk for chunk in self.decodes if chunk.branch.state is RUNNING]
        self.needy = [branch for branch in self.needy if branch.state is RUNNING]
        self.prefilling = [branch for branch in self.prefilling if branch.state is RUNNING]
        self.beams = [sequence for sequence in self.beams if sequence in self.active]

    # Branches

    def run(self, branch: Branch) -> None:
        """The branch has its blocks: puts it where its next step is planned."""
        branch.state = RUNNING
        sequence = branch.sequence
        self.active[sequence] = None
        computed = branch.num_computed == len(branch.tokens) - 1
        if computed and branch.num_output and sequence.reported and sequence.beams is None:
            self.decode(branch)
        elif branch.num_computed < prefill_end(branch):
            self.prefilling.append(branch)
            self.prefilling.sort(key=branch_rank)
        if sequence.beams is not None and sequence not in self.beams:
            self.beams.append(sequence)

    def decode(self, branch: Branch) -> None:
        """All but the last token is computed."""
        self.decodes.append(Chunk(branch, branch.num_computed, 1, (branch,)))
        if branch.num_computed >= branch.slots_end:
            self.needy.append(branch)

    def park(self, branch: Branch, state: BranchState) -> None:
        """Takes the branch off the device and out of the host pool. The caller tidies."""
        sequence = branch.sequence
        if branch.blocks:
            if self.host.into:
                self.host.forget(branch.blocks)
            self.blocks.release(branch.blocks)
        if branch.host_blocks:
            self.host.release(branch.host_blocks)
        branch.state = state
        branch.num_computed = branch.num_cached = branch.num_sealed = branch.slots_end = 0
        if not any(other.state is RUNNING for other in sequence.branches):
            self.active.pop(sequence, None)

    def extend_hashes(self, branch: Branch, num_blocks: int) -> list[BlockHash]:
        """The hashes of the first `num_blocks` blocks, all of which have to be full of known tokens."""
        hashes, size, root = branch.hashes, self.info.block_size, branch.sequence.root
        for index in range(len(hashes), num_blocks):
            parent = hashes[-1] if hashes else b""
            hashes.append(block_hash(root, parent, branch.tokens[index * size : (index + 1) * size]))
        return hashes if len(hashes) == num_blocks else hashes[:num_blocks]

    def seal(self, branch: Branch) -> None:
        """Offers the blocks that are full and computed now to the prefix cache."""
        first, end = branch.num_sealed, branch.num_computed // self.info.block_size
        branch.num_sealed = end
        if not self.config.prefix_caching:
            return
        hashes = self.extend_hashes(branch, end)
        for index in range(first, end):
            self.blocks.seal(hashes[index], branch.blocks[index])

    def fork(self, parent: Branch, child: Branch) -> None:
        """Gives the child the parent's computed blocks; whoever writes to a shared one first copies it."""
        child.state = RUNNING
        child.num_computed, child.num_cached, child.num_sealed = parent.num_computed, 0, parent.num_sealed
        child.blocks = self.blocks.share(parent.blocks[: self.blocks.blocks_for(parent.num_computed)])
        child.hashes = parent.hashes.copy()
        child.slots_end = parent.slots_end = 0

    # Ends

    def delta(self, branch: Branch, token_ids: tuple[int, ...], finish: FinishReason, failure: str = "") -> Delta:
        """The delta after `token_ids` have been appended to the branch."""
        sequence = branch.sequence
        delta = Delta(sequence, branch.index, branch.num_output - len(token_ids), token_ids, finish, failure)
        if sequence.params.ranked and branch.num_scored == sys.maxsize:  # else a replay has not scored it all yet
            delta.cumulative_logprob = branch.cumulative_logprob
        self.decorate(delta)
        return delta

    def decorate(self, delta: Delta) -> None:
        """Adds what goes with a sequence's first delta, and with the first of branch 0."""
        sequence = delta.sequence
        if not sequence.reported:
            sequence.reported = True
            delta.cached_tokens = sequence.cached_tokens or 0
        if delta.branch_index == 0 and len(sequence.prompt_scores) == len(sequence.prompt) - 1:
            delta.prompt_scores, sequence.prompt_scores = tuple(sequence.prompt_scores), []

    def finish(self, branch: Branch, reason: FinishReason, failure: str = "") -> None:
        """Ends a branch and, with the last one, its sequence. No delta."""
        branch.finish, branch.failure = reason, failure
        self.park(branch, FINISHED)
        if branch.sequence.finished:
            self.forget(branch.sequence)

    def end(self, sequence: Sequence, reason: FinishReason, failure: str = "") -> list[Delta]:
        """Ends all branches that still run, with what they have; the terminal deltas."""
        if sequence.beams is not None:
            deltas = self.end_beams(sequence, reason, failure)
        else:
            going = [branch for branch in sequence.branches if branch.state is not FINISHED]
            deltas = [self.delta(branch, (), reason, failure) for branch in going]
        for branch in sequence.branches:
            if branch.state is not FINISHED:
                self.finish(branch, reason, failure)
        self.tidy()
        return deltas

    def end_beams(self, sequence: Sequence, reason: FinishReason, failure: str = "") -> list[Delta]:
        """The best hypotheses there are, complete or not; `reason` is NONE if each has its own."""
        search = sequence.beams
        if search is None:
            return []
        if failure:
            search.complete.clear()
        elif reason is not FinishReason.NONE:
            for branch in sequence.branches:
                search.keep_live(tuple(branch.output), branch.cumulative_logprob, tuple(branch.scores or ()))
        deltas = []
        for index, (start, done) in enumerate(zip(search.starts, search.done, strict=True)):
            if done:
                continue
            best = search.complete[index] if index < len(search.complete) else None
            tokens = best.token_ids[start:] if best else ()
            finish = reason or (best.finish if best else FinishReason.STOP)
            delta = Delta(sequence, index, start, tokens, finish, failure)
            if best:
                delta.cumulative_logprob, delta.scores = best.total, best.scores[start:]
            self.decorate(delta)
            deltas.append(delta)
        return deltas

    def forget(self, sequence: Sequence) -> None:
        """It is on this worker no more."""
        self.dequeue(sequence)
        if self.sequences.get(sequence.seq_id) is sequence:
            del self.sequences[sequence.seq_id]
        self.unswap(sequence)
        self.active.pop(sequence, None)
        self.protected.discard(sequence)
        self.moved_out.discard(sequence)
        if sequence in self.loners:
            self.loners.remove(sequence)

    def unswap(self, sequence: Sequence) -> None:
        if sequence.swapped:
            sequence.swapped = False
            self.swapped.remove(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Forgets a sequence at once, with its blocks and without a word."""
        for branch in sequence.branches:
            if branch.state is not FINISHED:
                self.park(branch, FINISHED)
        self.forget(sequence)
        self.tidy()

    def end_step(self) -> None:
        self.blocks.end_step()
        self.host.end_step()
        self.protected.clear()
        self.moved_out.clear()

    def check(self) -> None:
        """Recounts blocks and lists from the sequences; raises AssertionError with what is wrong."""
        branches = [branch for sequence in self.sequences.values() for branch in sequence.branches]
        self.blocks.check(branch.blocks for branch in branches)
        self.host.check(branch.host_blocks for branch in branches)
        running = {branch for branch in branches if branch.state is RUNNING}
        listed = {chunk.branch for chunk in self.decodes} | set(self.prefilling)
        lockstep = {b for s in self.beams for b in s.branches if b.num_computed == prefill_end(b)}
        size, needy = self.info.block_size, set(self.needy)
        problems = {
            "a running branch is on no list, or one on a list does not run": running != listed | lockstep,
            "a branch has blocks in the wrong place": any(
                bool(b.blocks) > (b.state is RUNNING) or bool(b.host_blocks) != (b.state is SWAPPED) for b in branches
            ),
            "active is not who runs": set(self.active) != {branch.sequence for branch in running},
            "a decode has no slot of its own": any(
                c.branch not in needy
                and (
                    len(c.branch.blocks) * size <= c.branch.num_computed
                    or not self.blocks.writable(c.branch.blocks[c.branch.num_computed // size])
                )
                for c in self.decodes
            ),
            "a decode is not at its last token": any(
                c.start != c.branch.num_computed or c.start != len(c.branch.tokens) - 1 for c in self.decodes
            ),
            "a waiting branch is not queued": any(
                b.state is WAITING and not b.sequence.queued and not b.sequence.fan_out for b in branches
            ),
        }
        for problem, found in problems.items():
            if found:
                raise AssertionError(problem)
