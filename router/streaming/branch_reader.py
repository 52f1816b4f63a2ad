"""How far one client is in one branch (next token, chain, text), and which branches of best_of it gets at the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.request.errors import HistoryLost
from octavo.request.hashing import extend_chain
from octavo.request.sampling import FinishReason, TokenScore, rank
from octavo.text.stop import TextStream
from router.streaming.resume_tokens import StreamPlace, StreamStart


@dataclass(slots=True)
class BranchPiece:
    """New tokens of a branch, the text that has become certain with them, and the place after them."""

    branch: int
    first_index: int
    token_ids: Sequence[int]
    text: str
    finish: FinishReason  # not NONE: this is the last piece of the branch
    place: StreamPlace
    token_scores: Sequence[TokenScore] = ()  # one per token, or none at all


class BranchReader:
    """Reads journalled tokens in runs that may overlap and repeat, and gives each token out once, in order."""

    __slots__ = (
        "_confirmed_chain",
        "_prompt_chain",
        "_text",
        "_text_stopped",
        "branch",
        "chain",
        "confirmed_index",
        "finish",
        "next_index",
        "text_bytes",
    )

    def __init__(self, branch: int, prompt_chain: int, text: TextStream) -> None:
        self.branch = branch
        self.next_index = 0
        self.chain = self._prompt_chain = prompt_chain
        self.text_bytes = 0
        self.finish = FinishReason.NONE
        # Up to here a journal was found to hold what was read. Items of workers go further: a worker sends what the
        # journal has accepted, and the store may have lost it since.
        self.confirmed_index = 0
        self._confirmed_chain = prompt_chain
        self._text = text
        # Whether the text up to the client's place already ends the branch. The next run then ends it, even without new
        # tokens.
        self._text_stopped = False

    @property
    def place(self) -> StreamPlace:
        return StreamPlace(self.next_index, self.chain, self.text_bytes)

    def find_history(self, output: Sequence[int]) -> bool:
        """Whether the branch's output reaches as far as this reader. Raises HistoryLost if it has other tokens."""
        if len(output) < self.next_index:
            return False
        if extend_chain(self._prompt_chain, output[: self.next_index]) != self.chain:
            raise HistoryLost(
                f"branch {self.branch}: the store holds other tokens than were delivered before index "
                f"{self.next_index}: start again with a new request id"
            )
        self.note_confirmed()
        return True

    def confirm(self, first_index: int, token_ids: Sequence[int]) -> bool:
        """Whether the journal from `first_index` on holds all that was read. Raises HistoryLost if it differs."""
        num_known = self.next_index - first_index
        if first_index > self.confirmed_index or num_known > len(token_ids):
            return False
        known = token_ids[self.confirmed_index - first_index : num_known]
        if extend_chain(self._confirmed_chain, known) != self.chain:
            raise HistoryLost(
                f"branch {self.branch}: the store holds other tokens than were delivered between index "
                f"{self.confirmed_index} and {self.next_index}: start again with a new request id"
            )
        self.note_confirmed()
        return True

    def note_confirmed(self) -> None:
        """All that was read is in the journal."""
        self.confirmed_index, self._confirmed_chain = self.next_index, self.chain

    def go_to_place(self, place: StreamPlace, output: Sequence[int]) -> None:
        """Goes to where a client has been before, by the branch's output, which reaches at least that far.

        Raises HistoryLost if it does not, or if the client has received other tokens. If the client named an index
        only, the text of earlier tokens is not sent.
        """
        tokens = output[: place.index_within(len(output))]
        self.chain = extend_chain(self.chain, tokens)
        if place.chain is not None and place.chain != self.chain:
            raise HistoryLost("what this client has received is not what the journal holds: start again")
        self.next_index = len(tokens)
        if place.text_bytes is None:
            delta = self._text.push(tokens)
            self.text_bytes = len(delta.text.encode())
        else:
            delta = self._text.resume(tokens, place.text_bytes)
            self.text_bytes = place.text_bytes
        self._text_stopped = delta.stopped
        self.note_confirmed()

    def read_run(
        self, first_index: int, token_ids: Sequence[int], chain: int | None, finish: FinishReason
    ) -> BranchPiece | None:
        """Reads a run of tokens that begins at or before the next index. Returns what is new in it, None if nothing is.

        `chain` is the chain after the run, None if it is not known. `finish` is how the branch ends after the run.
        """
        if self.finish:
            return None
        new = token_ids[self.next_index - first_index :] if first_index < self.next_index else token_ids
        if not (new or finish or self._text_stopped):
            return None
        first, before = self.next_index, self.chain
        self.next_index += len(new)
        self.chain = extend_chain(before, new)
        if chain is not None and chain != self.chain and first_index + len(token_ids) == self.next_index:
            raise HistoryLost(f"branch {self.branch} differs from the journal before index {self.next_index}")
        delta = self._text.push(new)
        text = delta.text
        if delta.stopped:
            surplus = self.next_index - delta.num_tokens_used
            if surplus:
                new = new[:-surplus]
                self.next_index -= surplus
                self.chain = extend_chain(before, new)
            self.finish = FinishReason.STOP
        elif finish:
            self.finish = finish
            text += self._text.finish().text
        self.text_bytes += len(text) if text.isascii() else len(text.encode())
        return BranchPiece(self.branch, first, new, text, self.finish, self.place)


ReturnedBranch = tuple[StreamPlace, BranchPiece]  # where the client is in it, and all that the client does not have


class RankedBranches:
    """Collects whole branches. No branch is shown to the client before all have ended."""

    def __init__(self, num_branches: int, num_returned: int, new_reader: Callable[[int], BranchReader]) -> None:
        self._num_returned = num_returned
        self._new_reader = new_reader
        self._pieces: list[list[BranchPiece]] = [[] for _ in range(num_branches)]

    def add_piece(self, piece: BranchPiece) -> None:
        self._pieces[piece.branch].append(piece)

    def best_branches(self, branch_scores: Sequence[float | None], start: StreamStart) -> list[ReturnedBranch]:
        """The branches that are returned, the best first. All branches must have ended."""
        best = rank(branch_scores, self._num_returned)
        return [self._returned(returned, self._pieces[branch], start) for returned, branch in enumerate(best)]

    def _returned(self, returned: int, pieces: Sequence[BranchPiece], start: StreamStart) -> ReturnedBranch:
        tokens = [token for piece in pieces for token in piece.token_ids]
        token_scores = [score for piece in pieces for score in piece.token_scores]
        reader = self._new_reader(returned)
        reader.go_to_place(start.place_of(returned), tokens)
        place = reader.place
        rest = reader.read_run(place.next_index, tokens[place.next_index :], None, pieces[-1].finish)
        if rest is None:
            raise RuntimeError("a branch that has ended has no last piece")
        if len(token_scores) == len(tokens):
            rest.token_scores = token_scores[place.next_index :]
        return place, rest
