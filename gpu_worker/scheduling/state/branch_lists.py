"""The branches with blocks on the device, by what they need next.

Lists change through the methods of this class only. What its properties return is to be read, and to be copied by a
caller that moves a branch while it reads.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from gpu_worker.scheduling.state.sequence import RUNNING, Branch, Hold, Sequence
from gpu_worker.scheduling.state.step import Chunk


class BranchLists:
    def __init__(self) -> None:
        self._decodes: list[Chunk] = []
        self._needy: list[Branch] = []
        self._prefilling: list[Branch] = []
        self._searches: list[Sequence] = []
        self._stale = False  # some branches on the lists may run no more

    @property
    def decodes(self) -> SequenceOf[Chunk]:
        """A chunk, which every plan uses again, for each branch that needs one more token, in the order they began."""
        self._tidy()
        return self._decodes

    @property
    def needy(self) -> SequenceOf[Branch]:
        """The decodes whose next token has no slot yet."""
        self._tidy()
        return self._needy

    @property
    def prefilling(self) -> SequenceOf[Branch]:
        """The branches with known tokens to compute, by rank."""
        self._tidy()
        return self._prefilling

    @property
    def searches(self) -> SequenceOf[Sequence]:
        """The beam searches with a beam on the device. A beam is on `prefilling` until its known tokens are computed.

        When all beams have got there, they go on in lockstep.
        """
        self._tidy()
        return self._searches

    def note_stop(self) -> None:
        """Notes that branches do not run any more. They leave the lists before these are read again."""
        self._stale = True

    def add(self, branch: Branch) -> None:
        """Puts a branch that has got its blocks, and is about to be RUNNING, on the list that plans its next step."""
        self._tidy()
        sequence = branch.sequence
        computed = branch.num_computed == len(branch.tokens) - 1
        told = Hold.UNREPORTED not in sequence.holds and not branch.num_to_repeat  # else a prefill makes its item
        if computed and branch.num_output and told and sequence.search is None:
            self.add_decode(branch)
        elif branch.num_computed < branch.prefill_end:
            self._prefilling.append(branch)
            self._prefilling.sort(key=lambda branch: branch.rank)
        if sequence.search is not None and sequence not in self._searches:
            self._searches.append(sequence)

    def add_decode(self, branch: Branch) -> None:
        """All but the last token of the branch is computed: from now on it needs one token in each step."""
        self._decodes.append(Chunk(branch, branch.num_computed, 1, (branch,)))
        if branch.num_computed >= branch.slots_end:
            self._needy.append(branch)

    def end_prefill(self, branch: Branch) -> None:
        """Takes a branch whose known tokens are all computed off `prefilling`, if it is there."""
        if branch in self._prefilling:
            self._prefilling.remove(branch)

    def need_slot(self, branch: Branch) -> None:
        """Adds a decode that has used its last slot to `needy`."""
        self._needy.append(branch)

    def take_needy(self) -> list[Branch]:
        """Hands over the decodes that need a slot, each of which has to be given one or handed back."""
        needy, self._needy = self.needy, []
        return list(needy)

    def hand_back_needy(self, branches: Iterable[Branch]) -> None:
        """Takes back, from those that `take_needy` handed over, the branches that have got no slot."""
        self._needy = [branch for branch in branches if branch.state is RUNNING]

    def _tidy(self) -> None:
        if self._stale:
            self._stale = False
            self._decodes = [chunk for chunk in self._decodes if chunk.branch.state is RUNNING]
            self._needy = [branch for branch in self._needy if branch.state is RUNNING]
            self._prefilling = [branch for branch in self._prefilling if branch.state is RUNNING]
            self._searches = [s for s in self._searches if any(branch.state is RUNNING for branch in s.branches)]

    def check_lists(self, running: set[Branch]) -> None:
        """Compares the lists with the branches that run; raises AssertionError with what is wrong."""
        listed = {chunk.branch for chunk in self.decodes} | set(self.prefilling)
        lockstep = {b for s in self.searches for b in s.branches if b.num_computed == b.prefill_end}
        if running != listed | lockstep:
            raise AssertionError("a running branch is on no list, or one on a list does not run")
        if any(c.start != c.branch.num_computed or c.start != len(c.branch.tokens) - 1 for c in self.decodes):
            raise AssertionError("a decode is not at its last token")
