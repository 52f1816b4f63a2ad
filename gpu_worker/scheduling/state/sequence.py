"""A sequence on this worker: what was asked, its branches, and which of their tokens are computed.

A branch's tokens are the prompt and then its output. For each branch, half-open intervals over token positions:

    [0, num_passed blocks)      out of every layer's window: no later token sees them; the branch gave them back
    [passed, num_sealed blocks) full blocks that were offered to the prefix cache: perhaps shared, never written again
    [sealed, num_computed)      keys and values written by earlier steps
    [num_computed, end)         written by the step in flight, whose chunk ends there; lost if that step fails
    [end, len(tokens))          known, still to be run

A branch decodes when all but its last token are computed.
"""

import sys
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from gpu_worker.blocks.block_manager import Reservation
from gpu_worker.constraints.matcher import Grammar, Matcher
from gpu_worker.drafting.draft_model import DraftedBranch
from gpu_worker.drafting.drafts import Lookup
from gpu_worker.scheduling.state.beam import BeamSearch
from gpu_worker.scheduling.state.pooling import Pooling
from octavo.pictures.picture import Picture, parse_pictures, shown
from octavo.request.ids import BlockHash, BlockId, HostBlockId, SequenceId
from octavo.request.record import Admission
from octavo.request.sampling import SamplingParams, TokenScore
from octavo.text.stop import TextStream


class Place(Enum):
    """Where a sequence is. It follows from the states of its branches, and from freezes.

    admit ─▶ WAITING ─▶ STARTING ─▶ RUNNING ◀─▶ FROZEN
                ▲           │         │ ▲
                └───────────┴─────────┤ │     a sequence with one branch, or whose branches fork, is never STARTING
                                      ▼ │
                                    SWAPPED
    """

    ABSENT = "absent"  # not admitted yet, or ended
    WAITING = "waiting"  # has no blocks
    STARTING = "starting"  # some branches have blocks on the device, others wait to be started
    RUNNING = "running"  # all branches that go on have blocks on the device, or will fork from one that has
    FROZEN = "frozen"  # RUNNING, but it is in no step, while another worker takes it over with its blocks
    SWAPPED = "swapped"  # its blocks are in the host pool


class Hold(Enum):
    """Why a sequence, or a part of it, does not run where it is.

    A **suspect** may have killed its owners (CRASHED) or failed the step it was in (FAILED). No other sequence is in a
    step of a suspect. After a crash it does not run at all before its **trial**, in which it has the engine to itself.
    """

    REQUESTED = "requested"  # a caller has swapped it out: it neither starts nor comes back before IN, DROP or a drain
    AWAITS_PREFIX = "awaits prefix"  # blocks of its prompt are on their way from another worker: it starts after that
    CRASHED = "crashed"  # its owners have crashed: it runs in its trial only
    FAILED = "failed"  # it was in a step that failed: it is by itself in its steps until one of them has not failed
    STARVED = "starved"  # a suspect that has found no room: no other sequence starts before it
    FORKS = "forks"  # until branch 0 has computed the prompt: then the other branches fork from it
    UNREPORTED = "unreported"  # its first item has not been made: a prefill makes it, so the sequence does not decode


QUEUED = frozenset({Place.WAITING, Place.STARTING})  # some branch is WAITING and to be started
ON_DEVICE = frozenset({Place.STARTING, Place.RUNNING, Place.FROZEN})
KEPT_BACK = frozenset({Hold.REQUESTED, Hold.AWAITS_PREFIX})  # it does not come in, and others overtake it
SUSPECT = frozenset({Hold.CRASHED, Hold.FAILED})

EXCLUDES: dict[Hold, frozenset[Place | Hold]] = {
    Hold.REQUESTED: ON_DEVICE | {Hold.CRASHED, Hold.STARVED},
    Hold.AWAITS_PREFIX: ON_DEVICE | SUSPECT | {Place.SWAPPED, Hold.STARVED},
    Hold.CRASHED: frozenset({Place.FROZEN}),
    Hold.FAILED: frozenset({Place.FROZEN}),
    Hold.STARVED: frozenset({Place.RUNNING, Place.FROZEN}),
    Hold.FORKS: frozenset({Place.STARTING, Place.FROZEN}),
    Hold.UNREPORTED: frozenset({Place.FROZEN}),
}


def check_holds(place: Place, holds: AbstractSet[Hold]) -> None:
    """Raises AssertionError if a sequence in this place cannot have all these holds."""
    for hold in holds:
        for excluded in EXCLUDES[hold]:
            if excluded is place or excluded in holds:
                raise AssertionError(f"{hold} excludes {excluded}")
    if Hold.STARVED in holds and holds.isdisjoint(SUSPECT):
        raise AssertionError("a sequence that is no suspect is starved")


class BranchState(IntEnum):
    WAITING = 0  # has no blocks
    RUNNING = 1  # has blocks on the device
    SWAPPED = 2  # has blocks in the host pool
    FINISHED = 3


WAITING, RUNNING, SWAPPED, FINISHED = BranchState


@dataclass(slots=True, eq=False)
class Branch:
    """One stream of tokens of a sequence."""

    sequence: "Sequence"
    index: int  # in the record; of a beam, its place among the live beams
    tokens: list[int]  # prompt, then output
    num_prompt: int
    num_journalled_at_start: int = 0  # output tokens that came with the admission: the journal has them
    state: BranchState = BranchState.WAITING
    num_computed: int = 0
    blocks: list[BlockId] = field(default_factory=list)
    host_blocks: list[HostBlockId] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)  # of the leading full blocks, as far as computed
    cumulative_logprob: float = 0.0
    num_sealed: int = 0  # leading blocks that have been offered to the prefix cache
    # Leading blocks that are out of every layer's window: given back. Their places in `blocks` stay, and mean nothing.
    num_passed: int = 0
    first_unscored: int = sys.maxsize  # the first position that a prefill has still to score; maxsize: none
    stops: frozenset[int] = frozenset()  # tokens that need a second look: stop tokens, and the runner's marks
    last: int = sys.maxsize  # position of the last token it may have: max_tokens or the end of the context
    slots_end: int = 0  # while num_computed is below it, the next token has a slot in a block that no other has
    scores: list[TokenScore] | None = None  # beams only, when log probabilities are asked for
    # Journalled tokens that its first item repeats with their scores: the worker that had reported them is gone.
    num_to_repeat: int = 0
    repeated_scores: list[TokenScore] = field(default_factory=list)
    text: TextStream | None = None  # beams only, when there are stop strings
    matcher: Matcher | None = None  # once it has been sampled, if the sequence has a grammar
    lookups: tuple[Lookup, ...] = ()  # once drafts have been looked up for it
    drafted: DraftedBranch | None = None  # what a draft model knows of it
    draft_rows: int = 0  # how many rows of steps it is charged with for drafts: those of the fewest are served first
    num_drafts: int = 0  # tokens that were guessed for it here
    num_accepted_drafts: int = 0
    # What the runner knows of it; `StepInputs` and `BlockTables` write this.
    seat: int = -1  # under which number; -1: under none
    told_tokens: int = -1  # how many of its tokens; -1: nothing
    told_blocks: int = 0  # how many entries of `blocks`

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def prefill_end(self) -> int:
        """Where its prefill ends. The last token of a beam is left to the next step of the search, with all beams."""
        num_tokens = len(self.tokens)
        return num_tokens - (self.sequence.search is not None and num_tokens > self.num_prompt)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Its order when blocks are short: of two branches, the one of the lower rank keeps its blocks."""
        return (*self.sequence.rank, self.index)


@dataclass(frozen=True, slots=True)
class CarriedTail:
    """The last block of a branch, which is not full, as it came from the worker that ran the sequence."""

    reservation: Reservation  # has the block until the branch gets it
    num_computed: int  # tokens of the branch that are computed with this block; 0: it is of no use


@dataclass(frozen=True, slots=True)
class CarriedScores:
    """What a sequence brings from the worker that ran it, and no journal has: one entry for each branch.

    `scores` has an entry per token of a branch if the request asks for log probabilities. `tails` has those blocks
    that have come, by branch. `prompt_scores` are those of prompt[1:], if the request asks for them. `hashes` has those
    of the full blocks of a branch, so that they are not computed again.
    """

    cumulative_logprobs: tuple[float, ...]
    scores: tuple[tuple[TokenScore, ...], ...] = ()
    tails: Mapping[int, CarriedTail] = field(default_factory=dict)
    prompt_scores: tuple[TokenScore, ...] = ()
    hashes: Mapping[int, list[BlockHash]] = field(default_factory=dict)

    def fit(self, admission: Admission) -> bool:
        """Whether these are the scores of all that the admission asks to run on."""
        params = admission.sampling
        if len(self.cumulative_logprobs) != params.num_branches:
            return False
        scored_prompt = [score.token_id for score in self.prompt_scores]
        if params.prompt_logprobs is not None and scored_prompt != list(admission.prompt[1:]):
            return False
        if params.logprobs is None:
            return True
        going = [index for index in range(params.num_branches) if index not in admission.finished_branches]
        outputs = {index: list(output) for index, output in enumerate(admission.outputs)}
        scored = {index: [score.token_id for score in scores] for index, scores in enumerate(self.scores)}
        return all(scored.get(index) == outputs.get(index) for index in going)


@dataclass(slots=True, eq=False)
class Sequence:
    """What one admission asked for."""

    seq_id: SequenceId
    epoch: int
    prompt: list[int]
    params: SamplingParams  # validated, the seed concrete, max_tokens concrete
    root: bytes  # key of its block hashes: model, layout, adapter, numerics, tenant salt
    priority: int = 3  # 1 system, 2 interactive, 3 default, 4 bulk: lower first
    deadline: float | None = None  # of the worker's monotonic clock
    carried: CarriedScores | None = None  # it has moved here: its tokens have these scores
    beam_text: TextStream | None = None  # new, for beams with stop strings, which are found in it
    grammar: Grammar | None = None  # of its constraint
    adapter: int = 0  # the runner's number of its low-rank adapter; 0: none
    pictures: tuple[Picture, ...] = ()  # that its prompt shows
    pooling: Pooling | None = None  # it has no output: it ends with a vector of its prompt
    branches: list[Branch] = field(default_factory=list)  # with beam search: the live beams
    last_preempted: float = float("-inf")
    # What the scheduler keeps of it:
    order: int = 0  # counts admissions
    rank: tuple[int, int] = (0, 0)  # by the scheduler's policy; never changes. The lower one starts first
    place: Place = Place.ABSENT
    holds: set[Hold] = field(default_factory=lambda: {Hold.UNREPORTED})
    search: BeamSearch | None = None  # with beam search: its rules and complete outputs
    last_shed: float = float("-inf")  # when one of its branches last gave its blocks to an earlier branch
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache when it began; None: it has not started
    prompt_scores: list[TokenScore] = field(default_factory=list)
    leaves: bool = (
        False  # another worker is sent its blocks: it makes one token a step, so that the last ones get there
    )

    def note_cached(self, num_tokens: int) -> None:
        """It starts, and the prefix cache has so many tokens of its prompt. If it began elsewhere, none count."""
        self.cached_tokens = 0 if any(branch.output for branch in self.branches) else num_tokens

    @property
    def reports_scores(self) -> bool:
        """Whether clients get scores of prompt or output, which only a worker has and no journal."""
        return self.params.logprobs is not None or self.params.prompt_logprobs is not None

    @property
    def forks(self) -> bool:
        """Whether branch 0 computes the prompt for all branches, which then fork from it."""
        return Hold.FORKS in self.holds

    @property
    def kept_back(self) -> bool:
        """Whether it does not start or come back even if there is room, so that others overtake it."""
        return not self.holds.isdisjoint(KEPT_BACK)

    @property
    def is_suspect(self) -> bool:
        """Whether no other sequence may be in its steps."""
        return not self.holds.isdisjoint(SUSPECT)

    def shown(self, start: int, end: int) -> bytes:
        """Which pictures the tokens [start, end) of a branch show: a part of their block's hash."""
        return shown(self.pictures, start, end) if self.pictures else b""

    def find_place(self) -> Place:
        """Where it is by the states of its branches."""
        states = {branch.state for branch in self.branches}
        if SWAPPED in states:
            return Place.SWAPPED
        if RUNNING not in states:
            return Place.WAITING if WAITING in states else Place.ABSENT
        if WAITING in states and not self.forks:
            return Place.STARTING
        return Place.FROZEN if self.place is Place.FROZEN else Place.RUNNING

    @classmethod
    def from_admission(cls, admission: Admission, *, root: bytes, now: float) -> "Sequence":
        """A sequence with a branch for each branch of the record. Its deadline counts from `now`, in monotonic time."""
        sequence = cls(
            admission.seq_id,
            admission.epoch,
            list(admission.prompt),
            admission.sampling,
            root,
            admission.priority,
            now + admission.deadline_in_ms / 1000 if admission.deadline_in_ms else None,
            pictures=parse_pictures(admission.pictures),
        )
        if admission.suspect:
            sequence.holds.add(Hold.CRASHED)
        finished = frozenset(admission.finished_branches)
        for index in range(admission.sampling.num_branches):
            output = admission.outputs[index] if index < len(admission.outputs) else ()
            tokens = [*admission.prompt, *output]
            branch = Branch(sequence, index, tokens, len(admission.prompt), num_journalled_at_start=len(output))
            if index in finished:
                branch.state = FINISHED
            sequence.branches.append(branch)
        return sequence
