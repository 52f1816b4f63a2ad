"""What one client has of one request, and what comes next: the tokens, texts and ends of all its branches.

It is told of committed tokens from two sides, a worker's stream and the journal, in any order and as often as they
like. It knows nothing of workers, stores or wires.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from octavo.record import Record, Snapshot
from octavo.sampling import FinishReason, SamplingParams
from octavo.text.ranking import rank
from octavo.text.stop import TextStream
from router.streaming.branch_reader import BranchPiece, BranchReader, PlaceValues
from router.streaming.ranked_branches import RankedBranches
from router.streaming.resume_tokens import StreamStart

MAX_JOINED = 64  # tokens in one piece, when a client is slower than its worker

Logprob = TypeVar("Logprob")
Shown = tuple[
    int, BranchPiece, Sequence[Logprob]
]  # branch, what is new in it, a log probability per token or none at all


class Delivery(Generic[Logprob]):
    """Everything goes in by `take` and `feed`, and comes out once, in order, by `shown`."""

    def __init__(
        self, record: Record, params: SamplingParams, new_text: Callable[[], TextStream], start: StreamStart
    ) -> None:
        start.check(params.n)

        def new_reader(index: int) -> BranchReader:
            return BranchReader(index, record.prompt_chain, new_text())

        self.readers = [new_reader(index) for index in range(record.num_branches)]
        self.places: list[PlaceValues] = [(0, record.prompt_chain, 0)] * params.n  # after each branch's last event
        self.scores: list[float | None] = [None] * record.num_branches
        self.unsettled = False  # there is an end that the journal does not know
        # Where branches compete: whose score is of more than the client has, as a stop string stands before the end.
        self._unsure: set[int] = set()
        self._params = params
        self._start = start
        self._num_going = record.num_branches
        self._shown: list[Shown[Logprob]] = []
        ranked = record.num_branches > params.n
        self._ranked = RankedBranches[Logprob](record.num_branches, params.n, new_reader) if ranked else None

    @property
    def ended(self) -> bool:
        return self._num_going == 0

    @property
    def ranked(self) -> bool:
        """Whether branches compete: nothing is shown before all have ended."""
        return self._ranked is not None

    @property
    def next_indexes(self) -> list[int]:
        return [reader.next_index for reader in self.readers]

    @property
    def missing_indexes(self) -> list[int]:
        """From where a worker is asked to send: also the last token of a branch whose score there is not known."""
        return [reader.next_index - (reader.index in self._unsure) for reader in self.readers]

    # In

    def resume(self, snapshot: Snapshot) -> None:
        """Goes to where the client is, with the whole journal at hand."""
        if self._ranked is not None:
            return  # nothing has been shown before all branches have ended
        for reader, tokens in zip(self.readers, snapshot.outputs, strict=True):
            place = self._start.place(reader.index)
            reader.resume(tokens[: place.within(len(tokens))], place.chain, place.text_bytes)
            self.places[reader.index] = reader.place

    def behind_start(self, snapshot: Snapshot) -> bool:
        """Whether the journal is shorter than what the client says it has."""
        return self._ranked is None and any(
            self._start.place(branch).next_index > len(tokens) for branch, tokens in enumerate(snapshot.outputs)
        )

    def take(
        self,
        branch: int,
        first_index: int,
        token_ids: Sequence[int],
        chain: int,
        finish: FinishReason,
        logprobs: Sequence[Logprob],
        score: float | None,
    ) -> bool:
        """A worker's committed tokens; False if some before them are missing."""
        reader, end = self.readers[branch], first_index + len(token_ids)
        if reader.finish:
            if branch in self._unsure and score is not None and end == reader.next_index:
                self.scores[branch], self.unsettled = score, True
                self._unsure.discard(branch)
            return True
        skip = reader.next_index - first_index
        if skip < 0:
            return False
        if score is not None:
            self.scores[branch] = score
        piece = reader.push(first_index, token_ids, chain, finish)
        if piece is not None:
            self.unsettled |= bool(piece.finish) and not (finish and reader.next_index == end)
            self._add(branch, piece, logprobs[skip : skip + len(piece.token_ids)] if logprobs else ())
        return True

    def feed(self, snapshot: Snapshot, first_indexes: Sequence[int]) -> None:
        """What the journal has from those indexes on.

        Of branches that compete only what has ended: the rest comes from the worker, with the score at every token.
        """
        record = snapshot.record
        for branch, score in enumerate(record.scores):
            settled = self.readers[branch].finish and self.scores[branch] is not None  # it may be a stop string's
            if score is not None and not settled:
                self.scores[branch] = score
        for reader, first, tokens in zip(self.readers, first_indexes, snapshot.outputs, strict=True):
            finish = record.finishes[reader.index]
            if self._ranked is not None and not (finish or record.state.ended):
                continue
            piece = reader.push(first, tokens, None, finish)
            if piece is not None:
                self._look_at_end(reader, record)
                self._add(reader.index, piece, ())

    def _look_at_end(self, reader: BranchReader, record: Record) -> None:
        """Where a stop string stands before the end that the record knows, the record is to be told."""
        branch = reader.index
        if not reader.finish or (record.finishes[branch] and reader.next_index == record.final_lengths[branch]):
            return
        if self._ranked is None or not record.finishes[branch]:
            self.unsettled = True
        else:
            self._unsure.add(branch)

    def has_news(self, snapshot: Snapshot, first_indexes: Sequence[int]) -> bool:
        """Whether the journal is ahead of the client."""
        finishes = snapshot.record.finishes
        return any(
            (finishes[reader.index] and not reader.finish) or first + len(tokens) > reader.next_index
            for reader, first, tokens in zip(self.readers, first_indexes, snapshot.outputs, strict=True)
        )

    def _add(self, branch: int, piece: BranchPiece, logprobs: Sequence[Logprob]) -> None:
        if piece.finish:
            self._num_going -= 1
        if self._ranked is not None:
            self._ranked.add(branch, piece, logprobs)
        elif self._shown and can_join(self._shown[-1], branch, piece, logprobs):
            _, joined, earlier = self._shown[-1]
            joined.token_ids = [*joined.token_ids, *piece.token_ids]
            joined.text += piece.text
            joined.finish, joined.place = piece.finish, piece.place
            self._shown[-1] = (branch, joined, [*earlier, *logprobs])
        else:
            self._shown.append((branch, piece, logprobs))

    # Out

    def shown(self) -> list[Shown[Logprob]]:
        """What is new since the last call. Whoever tells the client sets `places` to the place after each piece."""
        if self._ranked is not None:
            if not self.ended:
                return []
            self.places, shown = self._ranked.best(self.scores, self._start)
            return shown
        shown, self._shown = self._shown, []
        return shown

    def stopped(self) -> list[tuple[int, int, float | None]]:
        """(branch, length, score) of those that a stop string ended, as far as this client's text is concerned."""
        ended = [r for r in self.readers if r.finish is FinishReason.STOP and r.index not in self._unsure]
        return [(reader.index, reader.next_index, self.scores[reader.index]) for reader in ended]

    def num_output_tokens(self) -> int:
        """Over all returned branches."""
        return sum(self.readers[branch].next_index for branch in self._returned())

    def returned_scores(self) -> list[float | None] | None:
        """The scores of the returned branches, once all have ended; None if they did not compete."""
        return [self.scores[branch] for branch in self._returned()] if self._params.ranked else None

    def _returned(self) -> Sequence[int]:
        return range(self._params.n) if self._ranked is None else rank(self.scores, self._params.n)


def can_join(before: Shown[Logprob], branch: int, piece: BranchPiece, logprobs: Sequence[Logprob]) -> bool:
    """Whether one event may carry both: tokens of one branch, with a log probability each or none at all."""
    last_branch, last, last_logprobs = before
    return (
        last_branch == branch
        and len(last.token_ids) + len(piece.token_ids) <= MAX_JOINED
        and (bool(logprobs) == bool(last_logprobs) or not piece.token_ids)
    )
