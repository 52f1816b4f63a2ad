"""Which sequence gives up its blocks when blocks are short, and whether by swap or by recompute.

A low rank goes first, so the sequence of the highest rank gives way: with the policy fcfs the one that arrived last,
with priority the last one of the lowest class. So no sequence waits for blocks while one of a higher rank has some. A
sequence that was preempted a moment ago is spared only by coming back later (`Starter`), and by keeping its blocks when
it needs more.

Some sequence always advances, because the sequence of the lowest rank is never preempted for another. When no branch
could advance, the planner *forces* the one of the lowest rank: it takes blocks from all others, then from later
branches of its own sequence. If no other sequence has blocks and its own do not suffice, the sequence waits to be given
to a larger worker. Where there is none, the branch finishes with LENGTH and the tokens it has, or with ERROR if it has
no output.
"""

from collections.abc import Callable

from gpu_worker.blocks.cost_model import CostModel
from gpu_worker.scheduling.state.sequence import RUNNING, Branch, Hold, Place, Sequence
from gpu_worker.scheduling.state.step import branch_item
from gpu_worker.scheduling.state.workload import Workload
from octavo.request.errors import OutOfBlocks
from octavo.request.sampling import FinishReason


class Preemption:
    """Takes blocks from sequences so that others can go on."""

    def __init__(self, workload: Workload, costs: CostModel) -> None:
        self._workload = workload
        self._tables = workload.tables
        self._costs = costs
        self.happened = False  # whether a sequence was preempted for the step being planned
        self.stuck: Sequence | None = None  # a search that the last plan could not advance

    def make_room(self, requester: Branch, num_missing: Callable[[], int], *, forced: bool = False) -> bool:
        """Preempts sequences until `num_missing()` blocks are available. False: the requester waits, or no longer runs.

        The number is asked for anew after each preemption: who leaves may have shared the block that was to be copied.
        """
        while self._tables.device.num_available < num_missing():
            victim = self._choose_victim(requester.sequence, forced=forced)
            if victim is not None:
                self.preempt(victim)
                if victim is requester.sequence:
                    return False
            elif not (forced and self._last_resort(requester)):
                return False
        return True

    def _choose_victim(self, requester: Sequence, *, forced: bool) -> Sequence | None:
        """The sequence that gives its blocks to `requester`: the one of the highest rank, perhaps the requester itself.

        None: the requester waits. It waits for the next step if this one writes the sequence of the highest rank. It
        waits if only frozen ones come after it, which are never chosen: they soon run on, or leave. It keeps what it
        has if it was preempted a moment ago, and if only it runs. With `forced` the requester is never chosen, and
        sequences that this step writes are passed over. Beside a requester on trial nothing else runs: whatever has
        blocks may be chosen.
        """
        work, written = self._workload, self._tables.written
        others = [sequence for sequence in work.active if sequence is not requester]
        later = [other for other in others if requester is work.on_trial or other.rank > requester.rank]
        if forced:
            later = [sequence for sequence in later if sequence not in written]
        victim = max((s for s in later if s.place is not Place.FROZEN), key=lambda s: s.rank, default=None)
        rested = work.now - requester.last_preempted >= work.config.min_preempt_interval_s
        if victim is None and others and not later and not forced and rested:
            victim = requester
        return None if victim in written else victim

    def preempt(self, sequence: Sequence) -> None:
        """Takes all device blocks of a sequence, by swap or by recompute."""
        work = self._workload
        if self._prefers_swap(sequence) and self._swap_out(sequence):
            work.num_preempted_swap += 1
        else:
            work.send_back(sequence)
            work.num_preempted_recompute += 1
        sequence.last_preempted = work.now
        self.happened = True

    def recompute(self, sequence: Sequence) -> int:
        """Takes a sequence's blocks and keeps its tokens. Returns how many blocks it had."""
        num_blocks = len({block for branch in sequence.branches for block in self._tables.held_blocks(branch)})
        num_blocks += len({block for branch in sequence.branches for block in branch.host_blocks})
        self._workload.send_back(sequence)
        return num_blocks

    def _swap_out(self, sequence: Sequence) -> bool:
        """Moves the computed blocks of a sequence to the host pool.

        False: they do not fit there, the step being planned writes some of them, some branch waits to be started, or
        nothing is computed.
        """
        computed = any(branch.num_computed for branch in sequence.branches if branch.state is RUNNING)
        if sequence.place is Place.STARTING or not computed or sequence in self._tables.written:
            return False
        try:
            self._workload.move_out(sequence)
        except OutOfBlocks:
            return False
        return True

    def hold_out(self, sequence: Sequence) -> int:
        """Moves a sequence out on request, and holds it: where it waits, or in the host pool.

        Returns how many blocks went. Raises OutOfBlocks if its blocks cannot move now; then it goes on.
        """
        used = {block for branch in sequence.branches for block in self._tables.computed_blocks(branch)}
        if sequence in self._workload.active and not self._swap_out(sequence):
            num_free, num_host_blocks = self._tables.tier.num_room, self._tables.host.num_blocks
            why = f"{num_free} of {num_host_blocks} blocks are free there"
            if len(used) <= num_free:
                why = "not all of its branches have blocks, or its blocks are on their way"
            raise OutOfBlocks(
                f"sequence {sequence.seq_id}: {len(used)} computed blocks cannot move to the host pool now: {why}; "
                "try again, or DROP the blocks"
            )
        self._workload.end_hold(sequence, Hold.STARVED)
        self._workload.hold(sequence, Hold.REQUESTED)
        return len(used)

    def unstick(self, beam: Branch) -> None:
        """Helps a search that has computed some beams again after a preemption, and has no room to start the others.

        Another sequence is preempted for it; or it gives its blocks to a sequence that waits before it; or it ends.
        """
        work, sequence = self._workload, beam.sequence
        victim = self._choose_victim(sequence, forced=True)
        if victim is not None:
            self.preempt(victim)
        elif self._others_hold_blocks():
            return  # the search waits until these blocks are given back
        elif sequence is not work.on_trial and self._is_awaited(sequence):
            work.send_back(sequence)  # sequences ahead of it may wait for its blocks
        elif self.stuck is not sequence:
            self.stuck = sequence  # alone by now, it has one more plan to start its other beams
        else:
            work.report(work.end(sequence, FinishReason.LENGTH))

    def _prefers_swap(self, sequence: Sequence) -> bool:
        config, info = self._workload.config, self._workload.info
        if config.preemption != "auto":
            return config.preemption == "swap"
        branches = [branch for branch in sequence.branches if branch.state is RUNNING]
        blocks = {block for branch in branches for block in self._tables.computed_blocks(branch)}
        num_tokens = sum(branch.num_computed for branch in branches)
        if config.prefix_caching:  # branches compute shared blocks once
            num_passed = max((branch.num_passed for branch in branches), default=0)
            num_tokens = min(num_tokens, (num_passed + len(blocks)) * info.block_size)
        return self._costs.swap_is_cheaper(len(blocks) * info.bytes_per_block, num_tokens)

    def _is_awaited(self, sequence: Sequence) -> bool:
        """Whether one of a lower rank may wait for the blocks of this one. One that is kept back waits for nothing."""
        others = (*self._workload.waiting, *self._workload.swapped)
        return any(other.rank < sequence.rank and not other.kept_back for other in others)

    def _others_hold_blocks(self) -> bool:
        return len(self._workload.active) > 1 or bool(self._tables.device.num_reserved)

    def _last_resort(self, requester: Branch) -> bool:
        """What is left when no other sequence can be preempted.

        True: a later branch of the requester's sequence has given up its blocks. False: the requester waits or ended.
        """
        work, sequence = self._workload, requester.sequence
        if self._others_hold_blocks():
            return False  # the requester waits until these blocks are given back
        later = [b for b in sequence.branches if b.state is RUNNING and b.index > requester.index]
        if later and sequence.search is None:
            work.send_branch_back(later[-1])
            work.num_preempted_recompute += 1
            sequence.last_shed = work.now
            return True
        if work.hand_to_larger(sequence):
            return False  # it waits until it is taken away
        if not requester.num_output:
            failure = OutOfBlocks(
                f"no block left to compute the prompt of {requester.num_prompt} tokens: it holds "
                f"{len(self._tables.held_blocks(requester))} of {work.info.num_blocks} and no other sequence has any"
            ).failure()
            work.report(work.end(sequence, FinishReason.ERROR, failure))
        elif sequence.search is not None:
            work.report(work.end(sequence, FinishReason.LENGTH))
        else:
            work.report([branch_item(requester, (), FinishReason.LENGTH)])
            work.finish(requester)
        return False
