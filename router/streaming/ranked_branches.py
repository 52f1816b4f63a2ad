"""Where branches compete (best_of), nothing is shown before all have ended: then the best, as if they came now."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from octavo.text.ranking import rank
from router.streaming.branch_reader import BranchPiece, BranchReader, PlaceValues
from router.streaming.resume_tokens import StreamStart

Logprob = TypeVar("Logprob")


class RankedBranches(Generic[Logprob]):
    """Whole branches, kept until their scores decide which are returned."""

    def __init__(self, num_branches: int, num_returned: int, new_reader: Callable[[int], BranchReader]) -> None:
        self._num_returned = num_returned
        self._new_reader = new_reader
        self._pieces: list[list[tuple[BranchPiece, Sequence[Logprob]]]] = [[] for _ in range(num_branches)]

    def add(self, branch: int, piece: BranchPiece, logprobs: Sequence[Logprob]) -> None:
        self._pieces[branch].append((piece, logprobs))

    def best(
        self, scores: Sequence[float | None], start: StreamStart
    ) -> tuple[list[PlaceValues], list[tuple[int, BranchPiece, Sequence[Logprob]]]]:
        """Where the client is in each returned branch, and the rest of each in one piece."""
        places: list[PlaceValues] = []
        shown: list[tuple[int, BranchPiece, Sequence[Logprob]]] = []
        for returned, branch in enumerate(rank(scores, self._num_returned)):
            reader, place, pieces = self._new_reader(returned), start.place(returned), self._pieces[branch]
            tokens = [token for piece, _ in pieces for token in piece.token_ids]
            logprobs = [logprob for _, some in pieces for logprob in some]
            first = place.within(len(tokens))
            reader.resume(tokens[:first], place.chain, place.text_bytes)
            places.append(reader.place)
            piece = reader.push(first, tokens[first:], None, pieces[-1][0].finish)
            if piece is not None:
                shown.append((returned, piece, logprobs[first:] if len(logprobs) == len(tokens) else ()))
        return places, shown
