"""What the journals hold of a sequence that runs here, as far as the store has answered this worker."""

import asyncio
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from gpu_worker.journal.step_subscription import StepSubscription
from gpu_worker.scheduling.state.sequence import Sequence
from octavo.request.errors import Failure
from octavo.request.hashing import extend_chain
from octavo.request.ids import SequenceId
from octavo.request.sampling import FinishReason, TokenScore
from octavo.request.step_item import StepItem
from octavo.store.calls import PROOF_TOKENS


@dataclass(slots=True)
class BranchLog:
    """What the journal of one branch holds, and how the branch ended."""

    tokens: list[int]
    chain: int  # hash over prompt and tokens
    finish: FinishReason = FinishReason.NONE
    failure: Failure | None = None
    ended: bool = False  # also true of a branch that had ended before the sequence was admitted; `finish` is NONE then
    # Every item published so far, whether or not a subscription followed, if the log keeps items.
    published: list[StepItem] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class SequenceLog:
    """The logs of a sequence's branches, and the subscriptions that follow them.

    A log keeps the items of a sequence whose scores clients get, or whose branches are ranked: a stop string may end a
    branch at any token, and the branch's score is the one at that token. Of other sequences, tokens are enough.
    """

    __slots__ = ("_keeps_items", "_num_accepted", "branches", "followers", "gone", "sequence", "settled")

    def __init__(
        self, sequence: Sequence, prompt_chain: int, outputs: Seq[Seq[int]], ended_branches: Iterable[int]
    ) -> None:
        """`outputs` are the journals of a replayed sequence, one per branch."""
        self.sequence = sequence
        self.followers: set[StepSubscription] = set()
        self.gone = False  # forgotten: nothing may be appended to it or published of it any more
        # Set when the store holds nothing against the sequence here: PROOF_TOKENS are journalled, or the store
        # knows of them otherwise, or the log is gone.
        self.settled = asyncio.Event()
        self._num_accepted = 0  # new tokens
        self.branches = [BranchLog(list(tokens), extend_chain(prompt_chain, tokens)) for tokens in outputs]
        for branch in ended_branches:
            self.branches[branch].ended = True
        self._keeps_items = sequence.params.ranked or sequence.reports_scores
        if self._keeps_items:
            for branch, log in enumerate(self.branches):
                # Tokens without their scores would come too early: the branch's first item repeats them with scores.
                if log.ended or not sequence.reports_scores or sequence.carried is not None:
                    log.published.append(self._item(branch, 0))

    @property
    def seq_id(self) -> SequenceId:
        return self.sequence.seq_id

    @property
    def epoch(self) -> int:
        return self.sequence.epoch

    @property
    def ended(self) -> bool:
        return all(branch.ended for branch in self.branches)

    @property
    def num_running(self) -> int:
        """The branches that have not ended."""
        return sum(not branch.ended for branch in self.branches)

    def forget(self) -> None:
        """Nothing is appended to the log or published of it from now on."""
        self.gone = True
        self.settled.set()

    def note_progress(self, num_tokens: int) -> None:
        """Takes note that the store knows of so many tokens that no journal shows yet."""
        if num_tokens >= PROOF_TOKENS:
            self.settled.set()

    def append_item(self, item: StepItem) -> None:
        """Records tokens that the journal has accepted, and gives the item its chain: followers may get it now.

        Tokens of the item that the log has already are not appended twice, as the store does not append them twice.
        """
        log = self.branches[item.branch]
        new = item.token_ids[max(0, len(log.tokens) - item.first_index) :]
        log.tokens.extend(new)
        self._num_accepted += len(new)
        if self._num_accepted >= PROOF_TOKENS:
            self.settled.set()
        log.chain = extend_chain(log.chain, new)
        log.finish, log.ended, log.failure = item.finish, bool(item.finish), item.failure
        item.chain = log.chain
        if self._keeps_items:
            log.published.append(item)

    def follows_move(self, item: StepItem) -> bool:
        """Whether these are the first tokens of a branch since its sequence has moved here: its client has waited."""
        sequence = self.sequence
        if sequence.carried is None:
            return False
        return item.first_index == sequence.branches[item.branch].num_journalled_at_start

    def scores_of(self, branch: int) -> list[TokenScore]:
        """The scores of all tokens of a branch; none if they are not kept, or not all are known."""
        log = self.branches[branch]
        scores: list[TokenScore] = []
        for item in log.published:
            if item.scores and item.first_index <= len(scores):
                scores[item.first_index :] = item.scores
        return scores if len(scores) == len(log.tokens) else []

    def prompt_scores(self) -> Seq[TokenScore]:
        """The scores of the prompt from its second token on; none if they were not asked for, or are not known yet."""
        return next((item.prompt_scores for item in self.branches[0].published if item.prompt_scores), ())

    def items_from(self, next_indexes: Seq[int]) -> list[StepItem]:
        """The items for a reader that has each branch's tokens up to its next index; 0 where no index is given."""
        items: list[StepItem] = []
        for branch, log in enumerate(self.branches):
            start = next_indexes[branch] if branch < len(next_indexes) else 0
            if self._keeps_items:
                items += [item for item in log.published if item.end > start or item.finish]
            elif start < len(log.tokens) or log.finish:
                items.append(self._item(branch, start))
        return items

    def failure_items(self, failure: Failure) -> list[StepItem]:
        """The items that end each running branch with `failure`, which no append has brought."""
        return [
            StepItem(self.seq_id, self.epoch, branch, len(log.tokens), (), log.chain, FinishReason.ERROR, failure)
            for branch, log in enumerate(self.branches)
            if not log.ended
        ]

    def _item(self, branch: int, first_index: int) -> StepItem:
        """The log of one branch from `first_index` on, as one item."""
        log = self.branches[branch]
        first, tokens = min(first_index, len(log.tokens)), tuple(log.tokens[first_index:])
        item = StepItem(self.seq_id, self.epoch, branch, first, tokens, log.chain, log.finish, log.failure)
        carried = self.sequence.carried
        if carried is not None and self._keeps_items:
            item.scores = carried.scores[branch][first:] if branch < len(carried.scores) else ()
            item.prompt_scores = carried.prompt_scores if branch == 0 else ()
            item.cumulative_logprob = carried.cumulative_logprobs[branch] if self.sequence.params.ranked else None
        return item
