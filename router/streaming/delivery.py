"""What one client has of one request, and what it gets next: the tokens, texts and ends of all branches.

A delivery is told of journalled tokens from two sides, by a worker's stream and by the journal, in any order and as
often as they come. It knows nothing of workers, stores or wire messages.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.request.errors import Failure
from octavo.request.record import Record, Snapshot
from octavo.request.sampling import FinishReason, SamplingParams, TokenScore, rank
from octavo.request.step_item import StepItem
from octavo.text.stop import TextStream
from router.streaming.branch_reader import BranchPiece, BranchReader, RankedBranches
from router.streaming.resume_tokens import StreamPlace, StreamStart

MAX_JOINED = 64  # tokens in one piece, when a client is slower than its worker
MAX_RUN = 4096  # tokens in one piece of a run; with the most log probabilities that is about 1 MiB of a message


@dataclass(frozen=True, slots=True)
class StoppedBranch:
    """A branch that a stop string has ended, as far as this client's text tells."""

    branch: int
    length: int
    score: float | None  # where branches are ranked


class Delivery:
    """Takes tokens by `add_item` and `add_journals`, and gives each out once, in order, by `next_piece`."""

    def __init__(
        self, record: Record, params: SamplingParams, new_text: Callable[[], TextStream], start: StreamStart
    ) -> None:
        start.check_num_places(params.n)

        def new_reader(branch: int) -> BranchReader:
            return BranchReader(branch, record.prompt_chain, new_text())

        self.readers = [new_reader(branch) for branch in range(record.num_branches)]
        self.branch_scores: list[float | None] = [None] * record.num_branches
        self.failure: Failure | None = None  # why the request failed
        self.failure_epoch: int | None = None  # of the worker that said so; None: the record says it
        self.unsettled = False  # whether there is an end that the store has to be told of
        # Ranked branches that have a stop string before their end. Their score is known only for more tokens than the
        # client gets.
        self._without_score: set[int] = set()
        self._places = [StreamPlace(0, record.prompt_chain, 0)] * params.n
        self._params = params
        self._start = start
        self._num_running = record.num_branches
        self._pieces: deque[BranchPiece] = deque()
        ranked = record.num_branches > params.n
        self._ranked = RankedBranches(record.num_branches, params.n, new_reader) if ranked else None
        self._ranking_done = False
        self._has_scores = params.logprobs is not None or params.prompt_logprobs is not None

    @property
    def ended(self) -> bool:
        """Whether all branches have ended. `next_piece` may still have pieces."""
        return self._num_running == 0 and (self.failure is not None or not self._awaits_scores)

    @property
    def _awaits_scores(self) -> bool:
        return any(self.branch_scores[branch] is None for branch in self._without_score)

    @property
    def selects_best(self) -> bool:
        """Whether the best of all branches are returned, so that the client gets nothing before all have ended.

        `SamplingParams.ranked` is also true of a beam search, whose worker selects the branches itself.
        """
        return self._ranked is not None

    @property
    def next_indexes(self) -> list[int]:
        """The index of the next token of each branch."""
        return [reader.next_index for reader in self.readers]

    @property
    def unconfirmed_indexes(self) -> list[int]:
        """The index from which each journal has to be read: no reading has found the tokens after it yet."""
        return [reader.confirmed_index for reader in self.readers]

    @property
    def missing_indexes(self) -> list[int]:
        """The index from which a worker has to send each branch. One without a score needs its last token once more."""
        return [reader.next_index - (reader.branch in self._without_score) for reader in self.readers]

    @property
    def places(self) -> Sequence[StreamPlace]:
        """The place of the client in each returned branch, after the last piece that `next_piece` has given out."""
        return self._places

    # In

    def go_to_start(self, snapshot: Snapshot) -> None:
        """Goes to where the client is. The snapshot must have the whole journals."""
        if self._ranked is not None:
            return  # the client has nothing before all branches have ended
        for reader, output in zip(self.readers, snapshot.outputs, strict=True):
            reader.go_to_place(self._start.place_of(reader.branch), output)
            self._places[reader.branch] = reader.place

    def has_more_than_journals(self, snapshot: Snapshot) -> bool:
        """Whether the client says that it has more tokens than the journals."""
        return self._ranked is None and any(
            self._start.place_of(branch).next_index > len(output) for branch, output in enumerate(snapshot.outputs)
        )

    def find_history(self, snapshot: Snapshot) -> bool:
        """Whether the whole journals have all that was delivered. Raises HistoryLost if they have something else."""
        found = [reader.find_history(output) for reader, output in zip(self.readers, snapshot.outputs, strict=True)]
        return all(found)

    def add_item(self, item: StepItem) -> bool:
        """Adds what a worker has journalled. False if tokens before it are missing."""
        if item.failure is not None:
            self.failure, self.failure_epoch, self.unsettled = item.failure, item.epoch, True
        reader, score = self.readers[item.branch], item.cumulative_logprob
        if reader.finish:
            counts = item.end == reader.next_index or (item.finish and self.branch_scores[item.branch] is None)
            if item.branch in self._without_score and score is not None and counts:
                self.branch_scores[item.branch], self.unsettled = score, True
                self._without_score.discard(item.branch)
            return True
        num_known = reader.next_index - item.first_index
        if num_known < 0:
            return False
        if score is not None:
            self.branch_scores[item.branch] = score
        self._add_run(reader, item.first_index, item.token_ids, item.chain, item.finish, item.scores)
        self.unsettled |= bool(reader.finish) and not (item.finish and reader.next_index == item.end)
        is_cut = reader.finish is FinishReason.STOP and not item.finish
        if is_cut and self._ranked is not None and self.branch_scores[item.branch] is None:
            # A stop string in what a new owner found in the journal: nobody tells the score there. That of the branch's
            # end, which its worker or the record tells, counts instead.
            self._without_score.add(item.branch)
        return True

    def add_journals(self, snapshot: Snapshot, first_indexes: Sequence[int]) -> None:
        """Adds what the journals have from those indexes on.

        Where the best of all branches are returned, or the client gets log probabilities, only branches that have
        ended are added: the others come from the worker, with their scores. Raises HistoryLost if a journal has other
        tokens than were delivered.
        """
        record = snapshot.record
        for branch, score in enumerate(record.scores):
            # The score that is known already may be that of a stop string, which the record does not know.
            is_known = self.readers[branch].finish and self.branch_scores[branch] is not None
            if score is not None and not is_known:
                self.branch_scores[branch] = score
        for reader, first, tokens in zip(self.readers, first_indexes, snapshot.outputs, strict=True):
            finish, confirmed = record.finishes[reader.branch], reader.confirm(first, tokens)
            if (self._ranked is not None or self._has_scores) and not (finish or record.state.ended):
                continue
            if self._add_run(reader, first, tokens, None, finish):
                self._compare_end(reader, record)
            if confirmed:
                reader.note_confirmed()
        if record.state.ended and self._without_score:  # no worker sends their scores any more: the others decide
            self._without_score.clear()
            self.unsettled = True

    def _add_run(
        self,
        reader: BranchReader,
        first_index: int,
        token_ids: Sequence[int],
        chain: int | None,
        finish: FinishReason,
        scores: Sequence[TokenScore] = (),
    ) -> bool:
        """Adds what is new in a run, in pieces that each fit into one event. Returns whether anything was."""
        found = False
        for start in range(0, len(token_ids) or 1, MAX_RUN):
            part, is_last = token_ids[start : start + MAX_RUN], start + MAX_RUN >= len(token_ids)
            num_known = reader.next_index - first_index
            piece = reader.read_run(
                first_index + start, part, chain if is_last else None, finish if is_last else FinishReason.NONE
            )
            if piece is not None:
                piece.token_scores = scores[num_known : num_known + len(piece.token_ids)]
                self._add_piece(piece)
                found = True
        return found

    def _compare_end(self, reader: BranchReader, record: Record) -> None:
        """Notes an end that the record does not know: a stop string stands before the end that it knows, if any."""
        branch = reader.branch
        if not reader.finish or (record.finishes[branch] and reader.next_index == record.final_lengths[branch]):
            return
        if self._ranked is None or not record.finishes[branch]:
            self.unsettled = True
        else:
            self._without_score.add(branch)

    def is_behind(self, snapshot: Snapshot, first_indexes: Sequence[int]) -> bool:
        """Whether the journals, read from those indexes on, have more than the client."""
        finishes = snapshot.record.finishes
        return any(
            (finishes[reader.branch] and not reader.finish) or first + len(tokens) > reader.next_index
            for reader, first, tokens in zip(self.readers, first_indexes, snapshot.outputs, strict=True)
        )

    def _add_piece(self, piece: BranchPiece) -> None:
        if piece.finish:
            self._num_running -= 1
        if self._ranked is not None:
            self._ranked.add_piece(piece)
        elif self._pieces and can_join(self._pieces[-1], piece):
            last = self._pieces[-1]
            last.token_ids = [*last.token_ids, *piece.token_ids]
            last.token_scores = [*last.token_scores, *piece.token_scores]
            last.text += piece.text
            last.finish, last.place = piece.finish, piece.place
        else:
            self._pieces.append(piece)

    # Out

    def next_piece(self) -> BranchPiece | None:
        """The next piece for the client, None if there is none yet. `places` moves with it."""
        if self._ranked is not None and self.ended and not self._ranking_done:
            self._ranking_done = True
            best = self._ranked.best_branches(self.branch_scores, self._start)
            self._places = [place for place, _ in best]
            self._pieces.extend(rest for _, rest in best)
        if not self._pieces:
            return None
        piece = self._pieces.popleft()
        self._places[piece.branch] = piece.place
        return piece

    def stopped_branches(self) -> list[StoppedBranch]:
        """The branches that a stop string has ended and whose score there is known, if they need one."""
        return [
            StoppedBranch(reader.branch, reader.next_index, self.branch_scores[reader.branch])
            for reader in self.readers
            if reader.finish is FinishReason.STOP and reader.branch not in self._without_score
        ]

    def num_output_tokens(self) -> int:
        """The number of output tokens of all returned branches."""
        return sum(self.readers[branch].next_index for branch in self._returned_branches())

    def score_of(self, returned: int) -> float | None:
        """The score of a returned branch that has ended; None if log probabilities are not summed, or not known."""
        return self.branch_scores[self._returned_branches()[returned]] if self._params.summed else None

    def _returned_branches(self) -> Sequence[int]:
        return range(self._params.n) if self._ranked is None else rank(self.branch_scores, self._params.n)


def can_join(last: BranchPiece, piece: BranchPiece) -> bool:
    """Whether one event may carry both: of one branch, and with a score for each token or for none."""
    return (
        last.branch == piece.branch
        and len(last.token_ids) + len(piece.token_ids) <= MAX_JOINED
        and (bool(piece.token_scores) == bool(last.token_scores) or not piece.token_ids)
    )
