"""May a running sequence leave with its blocks, and where has it stopped?

A frozen sequence keeps its blocks and does not run, and nobody takes blocks from it: who needs them waits. So it is to
be frozen for some milliseconds only. A cancel, its deadline, its drop and a newer epoch end it as ever.
"""

from collections.abc import Iterator
from typing import NamedTuple

from gpu_worker.scheduling.state.sequence import FINISHED, RUNNING, SWAPPED, WAITING, Hold, Sequence
from gpu_worker.scheduling.state.workload import Workload
from octavo.request.errors import CannotMove
from octavo.request.ids import SequenceId


class FrozenBranch(NamedTuple):
    num_tokens: int  # of its output
    cumulative_logprob: float
    finished: bool
    num_computed: int = 0  # of its prompt and output


class FrozenSequence(NamedTuple):
    """Where the branches of a sequence have stopped, in the order of the record."""

    seq_id: SequenceId
    epoch: int
    branches: list[FrozenBranch]


class PromptProgress(NamedTuple):
    """How far the tokens are computed that a sequence has begun with here."""

    started: bool  # some branch has its blocks
    complete: bool  # every branch that goes on has a token beyond them
    num_computed: int  # tokens of all branches


PASSING = ("prefill", "waiting")  # why a sequence cannot move yet, and will


class Freezer:
    """Freezes sequences of a workload. Commands call it: `freeze` and `thaw` between steps, the others at any time."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def check_movable(self, seq_id: SequenceId, epoch: int) -> Sequence:
        """The sequence, if it can leave with its blocks now. Raises NotFound, StaleEpoch, or CannotMove with a why."""
        sequence = self._workload.find(seq_id, epoch)
        for refusal in self._refusals(sequence):
            raise refusal
        return sequence

    def prompt_progress(self, seq_id: SequenceId, epoch: int) -> PromptProgress:
        """How far the sequence is from moving with its blocks, if all it lacks is that its prompt is computed.

        Raises what `check_movable` raises for other reasons.
        """
        sequence = self._workload.find(seq_id, epoch)
        refusals = list(self._refusals(sequence))
        for refusal in refusals:
            if refusal.cause not in PASSING:
                raise refusal
        going = [branch for branch in sequence.branches if branch.state is not FINISHED]
        started = any(branch.state is RUNNING for branch in going)
        return PromptProgress(started, not refusals, sum(branch.num_computed for branch in going))

    def freeze(self, seq_id: SequenceId, epoch: int) -> FrozenSequence:
        """Stops the sequence, which runs no step until `thaw`. Raises what `check_movable` raises. May be repeated."""
        sequence = self.check_movable(seq_id, epoch)
        self._workload.freeze(sequence)
        ends = [
            FrozenBranch(b.num_output, b.cumulative_logprob, b.state is FINISHED, b.num_computed)
            for b in sequence.branches
        ]
        return FrozenSequence(seq_id, epoch, ends)

    def slow_down(self, seq_id: SequenceId, epoch: int, *, leaves: bool) -> None:
        """Says whether the sequence has no drafts, since it leaves. Does nothing if it is not here any more."""
        sequence = self._workload.sequences.get(seq_id)
        if sequence is not None and sequence.epoch == epoch:
            sequence.leaves = leaves

    def thaw(self, seq_id: SequenceId, epoch: int) -> None:
        """Lets a frozen sequence run on. Does nothing if it is not here any more."""
        sequence = self._workload.sequences.get(seq_id)
        if sequence is not None and sequence.epoch == epoch:
            self._workload.thaw(sequence)

    def _refusals(self, sequence: Sequence) -> Iterator[CannotMove]:
        """Why the sequence cannot move. Another worker would not find all that it needs, or it does not run."""
        work = self._workload
        going = [branch for branch in sequence.branches if branch.state is not FINISHED]
        prefilling = sequence.forks or any(branch in work.lists.prefilling for branch in going)
        swapped = Hold.REQUESTED in sequence.holds or any(branch.state is SWAPPED for branch in going)
        problems = [
            ("no_cache", "this worker has no prefix cache", not work.tables.cache.enabled),
            ("pooling", "it has no output: it is asked of another worker anew", sequence.pooling is not None),
            ("beams", "beams compete with each other", sequence.search is not None),
            ("alone", "it is suspected of crashing workers", Hold.CRASHED in sequence.holds),
            ("isolated", "a step with it failed, so it runs alone", Hold.FAILED in sequence.holds),
            ("swapped", "its blocks are in the host pool", swapped),
            ("waiting", "it waits to be started", all(branch.state is WAITING for branch in going)),
            ("prefill", "its prompt is not computed yet", prefilling),
            ("waiting", "a branch waits", any(branch.state is not RUNNING for branch in going)),
            ("window", "blocks have left its window", any(branch.num_passed for branch in going)),
            ("copying", "its blocks are being copied", sequence in work.tables.written | work.tables.moving_out),
        ]
        for cause, why, found in problems:
            if found:
                yield CannotMove(f"sequence {sequence.seq_id} cannot move with its blocks: {why}", cause=cause)
