"""What a smaller model would say, which has the same tokenizer, and a runner with blocks of its own.

It draws with the parameters and the random numbers of the request, so it is right where both models agree, at every
temperature. What it keeps of a branch is a cache: it computes what it has not computed yet, some tokens at a time.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpu_worker.drafting.acceptance import Acceptance
from gpu_worker.steps.runner import Runner
from gpu_worker.steps.step_input import OpenedSeat, StepInput, TableChange, ints, longs
from octavo.request.sampling import PARAMETERS, SamplingParams

log = logging.getLogger(__name__)

TOKENS_AT_ONCE = 256  # that are computed of texts before their next token is guessed
MAX_KEPT = 256  # branches of which it keeps what it has computed
WEIGHT = 0.2  # of a measurement
# What a guess is drawn with. Parameters that name tokens are left out: a constraint's masks come later, and the rows of
# logits that no token has may be fewer.
KEPT_PARAMETERS = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *(row.name for row in PARAMETERS.values() if row.is_filter),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)


@dataclass(slots=True, eq=False)
class DraftedBranch:
    """What it knows of one branch."""

    num_prompt: int
    index: int
    params: SamplingParams
    acceptance: Acceptance = field(default_factory=Acceptance)
    seat: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)  # tokens whose keys and values it has: first known ones
    num_known: int = 0  # how many tokens the branch had when it was last asked about; later ones were guessed

    @classmethod
    def of(cls, params: SamplingParams, num_prompt: int, index: int) -> "DraftedBranch":
        return cls(num_prompt, index, SamplingParams(**{name: getattr(params, name) for name in KEPT_PARAMETERS}))

    def num_right(self, tokens: Sequence[int]) -> int:
        """Of how many leading tokens it has computed keys and values."""
        place, end = min(self.num_known, len(self.computed)), min(len(self.computed), len(tokens))
        while place < end and self.computed[place] == tokens[place]:
            place += 1
        return place


@dataclass(slots=True, eq=False)
class Question:
    """A branch with its tokens, and how many more it would have guessed. The answer stands in `drafts`."""

    branch: DraftedBranch
    tokens: Sequence[int]
    count: int
    drafts: list[int] = field(default_factory=list)


class DraftModel:
    """Answers questions about many branches at a time. Not thread-safe: it is asked while a step is planned."""

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        """`vocab_size` is that of the model that it guesses for."""
        self._runner = runner
        self._vocab_size = vocab_size
        self._info = runner.info
        self._free = list(range(self._info.num_blocks))
        self._kept: OrderedDict[DraftedBranch, None] = OrderedDict()  # the one that was asked about last is the last
        self._free_seats: list[int] = []
        self._num_seats = self._num_steps = 0
        self.failed = False
        self.token_s = 0.0  # how long a guess takes, as measured

    def answer(self, questions: Sequence[Question]) -> None:
        """Guesses for those branches that it knows up to their last token, or can compute up to there.

        If it fails, it guesses nothing from then on: no request ends for that.
        """
        if self.failed:
            return
        try:
            self._answer(questions)
        except Exception:
            log.exception("the draft model failed, and guesses nothing any more")
            self.failed = True

    def _answer(self, questions: Sequence[Question]) -> None:
        began, left = time.perf_counter(), TOKENS_AT_ONCE
        asking: list[Question] = []
        chunks: list[tuple[Question, int, int]] = []
        for question in questions:
            branch, tokens = question.branch, question.tokens
            if len(tokens) + question.count > self._info.context_tokens or left <= 0:
                continue
            start = min(branch.num_right(tokens), len(tokens) - 1)
            end = min(len(tokens), start + left)
            if not self._make_room(branch, len(tokens) + question.count, asking):
                continue
            del branch.computed[start:]
            branch.computed += tokens[start:end]
            branch.num_known = len(tokens)
            chunks.append((question, start, end))
            asking.append(question)
            left -= end - start
        if not chunks:
            return
        going = self._compute(chunks)
        while going := [question for question in going if len(question.drafts) < question.count]:
            going = self._go_on(going)
        if num_drafts := sum(len(question.drafts) for question in questions):
            token_s = (time.perf_counter() - began) / num_drafts
            self.token_s += (WEIGHT if self.token_s else 1.0) * (token_s - self.token_s)

    def close(self) -> None:
        self._runner.close()

    def _compute(self, chunks: Sequence[tuple[Question, int, int]]) -> list[Question]:
        """Runs pieces of texts. Those that are whole get their first guess, and are returned."""
        step = self._new_step()
        whole: list[Question] = []
        for question, start, end in chunks:
            branch, tokens = question.branch, question.tokens
            step.opened.append(OpenedSeat(branch.seat, branch.params, branch.num_prompt, longs(tokens[:start])))
            step.tables.append(TableChange(branch.seat, 0, ints(branch.blocks)))
            step.tokens.extend(tokens[start:end])
            self._place(step, branch, start, end)
            if end == len(tokens):
                self._sample(step, branch)
                whole.append(question)
        return self._run(step, whole)

    def _go_on(self, questions: list[Question]) -> list[Question]:
        step = self._new_step()
        step.num_decodes = len(questions)
        for question in questions:
            branch, end = question.branch, len(question.tokens) + len(question.drafts)
            step.tokens.append(question.drafts[-1])
            branch.computed.append(question.drafts[-1])
            self._place(step, branch, end - 1, end)
            self._sample(step, branch)
        return self._run(step, questions)

    def _run(self, step: StepInput, questions: list[Question]) -> list[Question]:
        """Gives the questions their next guesses. Those are left out for which there is none."""
        output, going = self._runner.run(step), []
        for question, token in zip(questions, output.token_ids, strict=True):
            if 0 <= token < self._vocab_size:
                question.drafts.append(token)
                going.append(question)
        return going

    def _new_step(self) -> StepInput:
        self._num_steps += 1
        return StepInput(self._num_steps)

    def _place(self, step: StepInput, branch: DraftedBranch, start: int, end: int) -> None:
        """Adds a chunk of the branch, whose tokens have been added, to the step."""
        size = self._info.block_size
        step.seats.append(branch.seat)
        step.lengths.append(end - start)
        step.ends.append(end)
        step.positions.extend(range(start, end))
        step.slots.extend(branch.blocks[place // size] * size + place % size for place in range(start, end))

    @staticmethod
    def _sample(step: StepInput, branch: DraftedBranch) -> None:
        step.sample_tokens.append(len(step.tokens) - 1)
        step.sample_seats.append(branch.seat)
        step.sample_branches.append(branch.index)

    # Blocks

    def _make_room(self, branch: DraftedBranch, num_tokens: int, asking: Sequence[Question]) -> bool:
        """Gives the branch a seat, and blocks for so many tokens: those of branches that were asked about long ago."""
        missing = -(-num_tokens // self._info.block_size) - len(branch.blocks)
        busy = {question.branch for question in asking} | {branch}
        idle = [other for other in self._kept if other not in busy]
        while idle and (len(self._free) < missing or (branch.seat < 0 and len(self._kept) >= MAX_KEPT)):
            self._forget(idle.pop(0))
        if len(self._free) < missing:
            return False
        if branch.seat < 0:
            branch.seat = self._free_seats.pop() if self._free_seats else self._num_seats
            self._num_seats = max(self._num_seats, branch.seat + 1)
        branch.blocks += [self._free.pop() for _ in range(missing)]
        self._kept[branch] = None
        self._kept.move_to_end(branch)
        return True

    def _forget(self, branch: DraftedBranch) -> None:
        del self._kept[branch]
        self._free += branch.blocks
        self._free_seats.append(branch.seat)
        branch.blocks, branch.computed, branch.seat = [], [], -1
