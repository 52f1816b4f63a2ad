"""How many rows and blocks a sequence needs that comes onto the device, and how many it has to leave to others."""

from gpu_worker.scheduling.state.sequence import Branch, Sequence
from gpu_worker.scheduling.state.workload import Workload


class Room:
    """Counts rows and blocks of a workload. It changes nothing."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._lists = workload.lists
        self._tables = workload.tables

    def num_rows(self) -> int:
        """Rows that the branches on the device sample, now or when their prompts are complete."""
        lists = self._lists
        beams = sum(sequence.params.beam_width for sequence in lists.searches)
        prompts = (branch.sequence for branch in lists.prefilling if branch.sequence.search is None)
        return len(lists.decodes) + beams + sum(self.rows_of(sequence, 1) for sequence in prompts)

    def rows_of(self, sequence: Sequence, num_branches: int) -> int:
        """Rows that `num_branches` more branches of the sequence sample: all its branches if they are to fork."""
        if sequence.search is not None:
            return 0 if sequence in self._lists.searches else sequence.params.beam_width
        return len(sequence.branches) if sequence.forks else num_branches

    def has_rows_for(self, num_rows: int) -> bool:
        """Whether a step that has the rows of the branches on the device can have so many more."""
        work = self._workload
        return not work.active or self.num_rows() + num_rows <= work.config.max_batch_sequences

    def still_needed(self, branch: Branch, num_blocks: int, num_passed: int) -> int:
        """Blocks that the branch needs until its next token, and one for each branch that will fork from it.

        Its table has `num_blocks` blocks by then, of which it has passed `num_passed`.
        """
        sequence = branch.sequence
        forks = len(sequence.branches) - 1 if sequence.forks else 0
        if sequence.search is not None and not branch.num_output:
            forks = sequence.params.beam_width - 1
        chunk = self._workload.config.max_batch_tokens
        return self._tables.num_missing(len(branch.tokens), num_blocks, num_passed, chunk=chunk) + forks

    def headroom(self, sequence: Sequence) -> int:
        """Blocks that a sequence preempted a moment ago must leave: one for each row, so that it runs on a while."""
        work = self._workload
        return self.num_rows() if work.now - sequence.last_preempted < work.config.min_preempt_interval_s else 0

    def spare(self) -> int:
        """Blocks that a new branch must leave: the watermark, and what prompts under way still need."""
        prefilling = self._lists.prefilling
        promised = sum(self.still_needed(branch, len(branch.blocks), branch.num_passed) for branch in prefilling)
        return self._tables.device.num_watermark + promised
