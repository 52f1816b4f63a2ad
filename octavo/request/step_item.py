"""The items in which tokens leave a worker: a step makes them, the journal takes them, and routers are sent them.

Their wire form is octavo.internal.v1.StepItem.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from octavo.request.errors import Failure
from octavo.request.ids import SequenceId
from octavo.request.sampling import FinishReason, TokenScore


@dataclass(slots=True)
class StepItem:
    """Tokens of one branch of a sequence, and the branch's end if it has ended."""

    seq_id: SequenceId
    epoch: int
    branch: int
    first_index: int  # the index of the first of token_ids in the branch's output
    token_ids: Sequence[int]
    chain: int = 0  # the chain after the last of token_ids, once the journal has them
    finish: FinishReason = FinishReason.NONE
    failure: Failure | None = None  # with FinishReason.ERROR
    scores: Sequence[TokenScore] = ()  # one per token, if the request asks for log probabilities
    prompt_scores: Sequence[TokenScore] = ()  # of prompt[1:], in branch 0's first item, if asked for
    cumulative_logprob: float | None = None  # the branch's score up to here, if branches are ranked; else with its end
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache; in the first item of a sequence
    prefill_ms: int | None = None  # since the first step here with this sequence; with cached_tokens, or not known
    num_drafts: int = 0  # tokens that were guessed for the branch here; with the branch's end
    num_accepted_drafts: int = 0  # of these, those that were drawn

    @property
    def end(self) -> int:
        """The index after the last token."""
        return self.first_index + len(self.token_ids)

    def is_continued_by(self, item: "StepItem") -> bool:
        """Whether one item can carry the tokens of both, this one's first.

        Items of ranked branches stay apart: a router's stop string may end the text at any token, and each item has
        the branch's score up to its own token.
        """
        return (
            self.end == item.first_index
            and self.branch == item.branch
            and self.epoch == item.epoch
            and self.seq_id == item.seq_id
            and not self.finish
            and item.cumulative_logprob is None
            and item.cached_tokens is None
            and (bool(item.scores) == bool(self.scores) or not item.token_ids)
        )


class WaitingItems:
    """Items that wait for their reader, in order. An item that continues another one of its branch is joined to it.

    The given items stay as they are.
    """

    __slots__ = ("_items", "_joined", "_latest", "num_tokens")

    def __init__(self, items: Iterable[StepItem] = ()) -> None:
        self.num_tokens = 0  # of all items
        self._items: list[StepItem] = []
        self._latest: dict[tuple[SequenceId, int], int] = {}  # by branch, the number of its last item
        # The lists of items that were made here, by number.
        self._joined: dict[int, tuple[list[int], list[TokenScore]]] = {}
        for item in items:
            self.add(item)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: StepItem) -> None:
        self.num_tokens += len(item.token_ids)
        key = (item.seq_id, item.branch)
        number = self._latest.get(key)
        if number is None or not self._items[number].is_continued_by(item):
            self._latest[key] = len(self._items)
            self._items.append(item)
            return
        lists = self._joined.get(number)
        if lists is None:
            last = self._items[number]
            lists = self._joined[number] = [*last.token_ids], [*last.scores]
            self._items[number] = replace(last, token_ids=lists[0], scores=lists[1])
        lists[0].extend(item.token_ids)
        lists[1].extend(item.scores)
        last = self._items[number]
        last.chain, last.finish, last.failure = item.chain, item.finish, item.failure
        last.num_drafts, last.num_accepted_drafts = item.num_drafts, item.num_accepted_drafts
        last.prompt_scores = last.prompt_scores or item.prompt_scores

    def take_items(self) -> list[StepItem]:
        """Removes all items and returns them."""
        items, self._items = self._items, []
        self.num_tokens = 0
        self._latest.clear()
        self._joined.clear()
        return items
