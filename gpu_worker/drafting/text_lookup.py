"""What came after the last tokens of a branch where they stood before, in its prompt or output.

A draft is a guess: nothing but speed depends on it. So a lookup is never journalled or sent, and forgets what is old.
"""

from collections.abc import Sequence

from gpu_worker.drafting.acceptance import Acceptance
from gpu_worker.drafting.drafts import LOOKUP

SIZE = 3  # tokens by which a place is found
LONG = 8  # tokens from which a match promises more
MAX_MATCH = 16  # tokens that are compared
MAX_INDEXED = 16_384  # tokens of a prompt that are indexed: the last ones
INDEXED_AT_ONCE = 2048  # in one step: about a millisecond


class TextLookup:
    """One branch's. It indexes tokens as they come, so a step costs the same however long the text is."""

    __slots__ = ("_acceptances", "_distance", "_end", "_is_long", "_place", "_places")
    name = LOOKUP

    def __init__(self, num_tokens: int) -> None:
        self._places: dict[int, int] = {}  # by hash of SIZE tokens: where the token after them stands
        self._end = max(SIZE, num_tokens - MAX_INDEXED)  # the next place to index
        self._place = 0  # where the text went on, as it was found last
        self._distance = 0  # how far back the last draft came from; 0: there was none
        self._acceptances = (Acceptance(), Acceptance(0.8))  # of short matches, of long ones
        self._is_long = False  # the match of the last draft

    def find(self, tokens: Sequence[int]) -> int:
        """How many of the last tokens stand where the text went on; 0 if nowhere. It is the longer match of two:

        the last one of the same SIZE tokens, and the one from which the last draft came.
        """
        num_tokens = len(tokens)
        end = min(num_tokens, self._end + INDEXED_AT_ONCE)
        places = self._places
        for place in range(self._end, end):
            places[hash(tuple(tokens[place - SIZE : place]))] = place
        self._end = max(end, self._end)
        if end < num_tokens:
            return 0
        found = places.get(hash(tuple(tokens[-SIZE:])), 0)
        length = _match(tokens, found) if found else 0
        if self._distance and (earlier := num_tokens - self._distance) != found:
            same = _match(tokens, earlier)
            if same > length:
                found, length = earlier, same
        self._is_long, self._place = length >= LONG, found
        return length if length >= SIZE else 0

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` tokens from the place that `find` has found. What is past the end repeats what was before it."""
        place = self._place
        self._distance = period = len(tokens) - place
        if count <= period:
            return list(tokens[place : place + count])
        return [tokens[place + index % period] for index in range(count)]

    @property
    def acceptance(self) -> Acceptance:
        """Of drafts from matches as long as the last one."""
        return self._acceptances[self._is_long]


def _match(tokens: Sequence[int], place: int) -> int:
    """How many tokens before `place` are the last tokens."""
    length = 0
    for length in range(min(MAX_MATCH, place)):
        if tokens[place - 1 - length] != tokens[-1 - length]:
            return length
    return length + 1
