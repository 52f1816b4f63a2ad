"""The branches of a request that returns only the best of them (best_of), kept until the scores decide."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.request.sampling import rank
from router.streaming.branch_reader import BranchPiece, BranchReader
from router.streaming.resume_tokens import StreamPlace, StreamStart


@dataclass(frozen=True, slots=True)
class ReturnedBranch:
    """One of the best branches, under the number by which the client knows it."""

    place: StreamPlace  # where the client is in it
    rest: BranchPiece  # all that the client does not have of it


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
        return ReturnedBranch(place, rest)
