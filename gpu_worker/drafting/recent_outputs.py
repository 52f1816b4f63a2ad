"""How recent outputs of other requests went on after the last tokens of a branch: of requests with the same root alone.

The root of a sequence names model, adapter, numerics and the salt of its tenant. Each root has an index of its own, and
nothing leads from one to another. So how quickly the tokens of one tenant come tells nothing of another one's outputs.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence

from gpu_worker.drafting.acceptance import Acceptance
from gpu_worker.drafting.drafts import RECENT
from gpu_worker.drafting.text_lookup import LONG, MAX_MATCH

SIZES = (4, MAX_MATCH)  # tokens by which a place is found: the last place of each
ROOM = 32_768  # tokens of the newer outputs of a root; as many older ones are kept until these are full
MAX_ROOTS = 32  # beyond which the one that has been idle longest is forgotten
INDEXED_AT_ONCE = 512  # tokens, in one step: about half a millisecond
MAX_LATE = 256  # outputs that wait to be indexed
END = -1  # stands between two outputs


class Shelf:
    """Outputs one after another, and where the last tokens stand that have the same hash. It never grows past ROOM."""

    __slots__ = ("tables", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        self.tables = tuple(array("i", bytes(8 * ROOM)) for _ in SIZES)  # by hash: the place after the tokens, or 0

    def index(self, place: int) -> None:
        """Makes the place findable by the tokens before it. A place of the same hash is forgotten."""
        tokens = self.tokens
        for size, table in zip(SIZES, self.tables, strict=True):
            if place >= size:
                table[hash(tuple(tokens[place - size : place])) % len(table)] = place

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """A place after the last tokens, and how many of them stand before it: by the most tokens that find one."""
        for size, table in zip(reversed(SIZES), reversed(self.tables), strict=True):
            place = table[hash(tuple(tokens[-size:])) % len(table)]
            if place and (length := self.match(tokens, place)) >= size:
                return place, length
        return 0, 0

    def match(self, tokens: Sequence[int], place: int) -> int:
        """How many of the last tokens stand before the place, as far as that counts."""
        shelved, most = self.tokens, min(MAX_MATCH, place, len(tokens))
        for length in range(most):
            if shelved[place - 1 - length] != tokens[-1 - length]:
                return length
        return most


class RootOutputs:
    """The recent outputs of one root."""

    __slots__ = ("shelves",)

    def __init__(self) -> None:
        self.shelves = [Shelf()]  # the newer one, and the older one once there is one

    def shelf_for(self, num_tokens: int) -> Shelf:
        """The newer shelf, with room for so many tokens."""
        if len(self.shelves[0].tokens) + num_tokens > ROOM:
            self.shelves = [Shelf(), self.shelves[0]]
        return self.shelves[0]


class RecentOutputs:
    """Those of a worker, by root. Outputs are indexed some tokens a step, so no step waits for a long one."""

    def __init__(self) -> None:
        self._roots: OrderedDict[bytes, RootOutputs] = OrderedDict()
        self._late: deque[tuple[bytes, list[int], int]] = deque(maxlen=MAX_LATE)
        self._shelf: Shelf | None = None  # of the output that is being indexed, the first one of those that wait
        self._next = 0  # its next token to index

    def add(self, root: bytes, tokens: list[int], num_prompt: int) -> None:
        """Takes in a branch that has ended. Its tokens must not change any more."""
        if len(tokens) > num_prompt:
            if len(self._late) == MAX_LATE:
                self._shelf = None
            self._late.append((root, tokens, num_prompt))

    def index_some(self) -> None:
        left = INDEXED_AT_ONCE
        while left > 0 and self._late:
            root, tokens, num_prompt = self._late[0]
            first = max(num_prompt, len(tokens) - ROOM // 2)
            if self._shelf is None:
                known = tokens[max(0, first - MAX_MATCH) : first]
                self._shelf, self._next = self._of(root).shelf_for(1 + len(known) + len(tokens) - first), first
                self._shelf.tokens.append(END)
                self._shelf.tokens.extend(known)
            shelf, end = self._shelf, min(len(tokens), self._next + left)
            for token in tokens[self._next : end]:
                shelf.index(len(shelf.tokens))
                shelf.tokens.append(token)
            left -= end - self._next
            self._next = end
            if end == len(tokens):
                self._late.popleft()
                self._shelf = None

    def shelves(self, root: bytes) -> Sequence[Shelf]:
        """Those of a root, the newer one first."""
        return self._of(root).shelves if root in self._roots else ()

    def _of(self, root: bytes) -> RootOutputs:
        if root not in self._roots:
            self._roots[root] = RootOutputs()
        self._roots.move_to_end(root)
        if len(self._roots) > MAX_ROOTS:
            self._roots.popitem(last=False)
        return self._roots[root]


class RecentLookup:
    """One branch's view of them: the output that its last draft came from goes on being followed."""

    name = RECENT

    def __init__(self, outputs: RecentOutputs, root: bytes) -> None:
        self._outputs, self._root = outputs, root
        self._acceptances = (Acceptance(), Acceptance(0.8))  # of short matches, of long ones
        self._shelf: Shelf | None = None  # where the last match is
        self._place = self._num_tokens = self._length = 0  # the last match, and of how many tokens

    def find(self, tokens: Sequence[int]) -> int:
        """How many of the last tokens stand where an output went on; 0 if nowhere. It is the longer match of two:

        where the last draft came from, and the last place in the newer outputs, or else in the older ones.
        """
        place, length = self._place + len(tokens) - self._num_tokens, 0
        if self._shelf is not None and place < len(self._shelf.tokens) and self._shelf.tokens[place] != END:
            length = self._shelf.match(tokens, place)
        if length < MAX_MATCH:
            for shelf in self._outputs.shelves(self._root):
                found, its_length = shelf.find(tokens)
                if found:
                    if its_length > length:
                        self._shelf, place, length = shelf, found, its_length
                    break
        self._place, self._num_tokens = place, len(tokens)
        self._length = length if length >= SIZES[0] else 0
        return self._length

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens, which came after the place that `find` has found for these tokens."""
        if self._shelf is None:
            return []
        drafts = self._shelf.tokens[self._place : self._place + count].tolist()
        return drafts[: drafts.index(END)] if END in drafts else drafts

    @property
    def acceptance(self) -> Acceptance:
        """Of drafts from matches as long as the last one."""
        return self._acceptances[self._length >= LONG]
