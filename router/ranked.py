"""Where branches compete (best_of), nothing is shown before all have ended: then the best, as if they came now."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from octavo.text.ranking import rank
from router.branch import BranchReader, Piece
from router.resume import Start

Logprob = TypeVar("Logprob")


class RankedBranches(Generic[Logprob]):
    """Whole branches, kept until their scores decide which are returned."""

    def __init__(self, num_branches: int, num_returned: int, new_reader: Callable[[int], BranchReader]) -> None:
        self._num_returned = num_returned
        self._new_reader = new_reader
        self._pieces: list[list[tuple[Piece, Sequence[Logprob]]]] = [[] for _ in range(num_branches)]

    def add(self, branch: int, piece: Piece, logprobs: Sequence[Logprob]) -> None:
        self._pieces[branch].append((piece, logprobs))

    def best(self, scores: Sequence[float | None], start: Start) -> list[tuple[int, Piece, Sequence[Logprob]]]:
        """Each returned branch in one piece, from where the client begins."""
        ranked = rank(scores, self._num_returned)
        return [self._from(start, returned, self._pieces[branch]) for returned, branch in enumerate(ranked)]

    def _from(
        self, start: Start, returned: int, pieces: list[tuple[Piece, Sequence[Logprob]]]
    ) -> tuple[int, Piece, Sequence[Logprob]]:
        tokens = [token for piece, _ in pieces for token in piece.token_ids]
        logprobs = [logprob for _, some in pieces for logprob in some]
        reader, place = self._new_reader(returned), start.place(returned)
        first = place.within(len(tokens))
        reader.resume(tokens[:first], place.chain, place.text_bytes)
        whole = reader.push(first, tokens[first:], None, pieces[-1][0].finish)
        if whole is None:
            raise ValueError("a branch that has ended has its end to show")
        return returned, whole, logprobs[first:] if len(logprobs) == len(tokens) else ()
