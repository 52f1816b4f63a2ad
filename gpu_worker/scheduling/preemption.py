"""Making room on the device: who gives way, and whether its blocks go to the host pool or are computed again.

Somebody always advances. The sequence ranked first is never preempted for another, and may, when nothing else helps,
take blocks even from those preempted a moment ago, then from its own later branches. If it is alone and its blocks
still do not suffice, this worker's memory is where its context ends: it finishes with LENGTH and what it has.
"""

from gpu_worker.scheduling.policy import choose_victim
from gpu_worker.scheduling.sequence import Branch, Sequence
from gpu_worker.scheduling.workload import FINISHED, RUNNING, SWAPPED, WAITING, Workload
from octavo.errors import OutOfBlocks
from octavo.sampling import FinishReason


class Preemption:
    """Takes blocks from sequences so that others can go on."""

    def __init__(self, work: Workload) -> None:
        self._work = work
        self.happened = False  # since the planner last looked
        self.stuck: Sequence | None = None  # whom the last plan could not advance, with nobody else in the way

    def make_room(self, requester: Branch, num_blocks: int, now: float, *, forced: bool = False) -> bool:
        """Whether `num_blocks` can be had. False: the requester waits, or has itself been preempted or finished."""
        work = self._work
        since = now - work.config.min_preempt_interval_s
        while work.blocks.num_available < num_blocks:
            victim = choose_victim(work.active, requester.sequence, work.protected, since, forced=forced)
            if victim is not None:
                self.preempt(victim, now)
                if victim is requester.sequence:
                    return False
            elif not (forced and self._last_resort(requester, now)):
                return False
        return True

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Frees all device blocks of a sequence, the cheaper way."""
        if not (self._prefers_swap(sequence) and self.swap_out(sequence)):
            self.recompute(sequence)
            self._work.num_preempted_recompute += 1
        else:
            self._work.num_preempted_swap += 1
        sequence.last_preempted = now
        self.happened = True

    def recompute(self, sequence: Sequence) -> int:
        """Drops the blocks and keeps the tokens; the number of blocks it had."""
        work = self._work
        branches = [branch for branch in sequence.branches if branch.state in (RUNNING, SWAPPED)]
        num_blocks = len({block for branch in branches for block in branch.blocks})
        num_blocks += len({block for branch in branches for block in branch.host_blocks})
        for branch in branches:
            work.park(branch, WAITING)
        work.unswap(sequence)
        work.enqueue(sequence)
        work.tidy()
        return num_blocks

    def swap_out(self, sequence: Sequence) -> bool:
        """Moves the computed blocks to the host pool; False if they do not fit there or some branch has none."""
        work = self._work
        branches = [branch for branch in sequence.branches if branch.state is RUNNING]
        started = all(branch.state in (RUNNING, FINISHED) for branch in sequence.branches) or sequence.fan_out
        if not started or sequence in work.protected or not any(branch.num_computed for branch in branches):
            return False
        try:
            tables = work.host.copy_out(
                branch.blocks[: work.blocks.blocks_for(branch.num_computed)] for branch in branches
            )
        except OutOfBlocks:
            return False
        for branch, table in zip(branches, tables, strict=True):
            num_computed = branch.num_computed
            work.park(branch, SWAPPED)
            branch.host_blocks, branch.num_computed = table, num_computed
        sequence.swapped = True
        work.swapped.add(sequence)
        work.moved_out.add(sequence)
        work.tidy()
        return True

    def send_away(self, sequence: Sequence, until: float) -> int:
        """Moves a running sequence out on request, and keeps it out until then; how many blocks went."""
        work = self._work
        used = {block for b in sequence.branches for block in b.blocks[: work.blocks.blocks_for(b.num_computed)]}
        if not self.swap_out(sequence):
            raise OutOfBlocks(
                f"sequence {sequence.seq_id}: {len(used)} computed blocks cannot move to the host pool now "
                f"({work.host.num_free} blocks free there)"
            )
        sequence.hold_until = until
        return len(used)

    def _prefers_swap(self, sequence: Sequence) -> bool:
        work = self._work
        if work.config.preemption != "auto":
            return work.config.preemption == "swap"
        branches = [branch for branch in sequence.branches if branch.state is RUNNING]
        blocks = {b for branch in branches for b in branch.blocks[: work.blocks.blocks_for(branch.num_computed)]}
        num_tokens = sum(branch.num_computed for branch in branches)
        if work.config.prefix_caching:  # what branches share is computed once
            num_tokens = min(num_tokens, len(blocks) * work.info.block_size)
        return work.costs.swap_is_cheaper(len(blocks) * work.info.bytes_per_block, num_tokens)

    def unstick(self, beam: Branch, now: float) -> None:
        """A search has some of its beams computed again and no room for the others: makes room, gives way, or ends."""
        work, sequence = self._work, beam.sequence
        victim = choose_victim(work.active, sequence, work.protected, now, forced=True)
        if victim is not None:
            self.preempt(victim, now)
        elif len(work.active) > 1 or work.blocks.num_reserved:
            return  # what they hold comes back
        elif any(work.key(other) < work.key(sequence) for queue in (work.waiting, work.swapped) for other in queue):
            self.recompute(sequence)  # they are ahead of it and may wait for its blocks
        elif self.stuck is not sequence:
            self.stuck = sequence  # alone by now, it has one more plan to start the others
        else:
            work.pending += work.end(sequence, FinishReason.LENGTH)

    def _last_resort(self, requester: Branch, now: float) -> bool:
        """Nobody else can give way: later branches of the same sequence do (True), or the requester ends."""
        work, sequence = self._work, requester.sequence
        if len(work.active) > 1 or work.blocks.num_reserved:
            return False  # what they hold comes back
        later = [b for b in sequence.branches if b.state is RUNNING and b.index > requester.index]
        if later and sequence.beams is None:
            work.park(later[-1], WAITING)
            work.enqueue(sequence)
            sequence.last_shed = now
            work.num_preempted_recompute += 1
            work.tidy()
            return True
        if not requester.num_output:
            failure = OutOfBlocks(
                f"no block left to compute the prompt of {requester.num_prompt} tokens: it holds "
                f"{len(requester.blocks)} of {work.info.num_blocks} and no other sequence has any"
            ).failure()
            work.pending += work.end(sequence, FinishReason.ERROR, failure.to_json())
        elif sequence.beams is not None:
            work.pending += work.end(sequence, FinishReason.LENGTH)
        else:
            work.pending.append(work.delta(requester, (), FinishReason.LENGTH))
            work.finish(requester, FinishReason.LENGTH)
            work.tidy()
        return False
