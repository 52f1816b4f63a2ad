"""How far one client is in one branch: which token comes next, the chain there, and the text that goes with it."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import HistoryLost
from octavo.hashing import extend_chain
from octavo.sampling import FinishReason
from octavo.text.stop import TextStream

PlaceValues = tuple[int, int, int]  # next index, chain there, bytes of text before it


@dataclass(slots=True)
class BranchPiece:
    """New tokens of a branch, with the text that has become certain, and the place after them."""

    first_index: int
    token_ids: Sequence[int]
    text: str
    finish: FinishReason
    place: PlaceValues


class BranchReader:
    """Takes committed tokens in whatever order and number they come, and passes each on once."""

    __slots__ = ("_text", "_text_stopped", "chain", "finish", "index", "next_index", "text_bytes")

    def __init__(self, index: int, prompt_chain: int, text: TextStream) -> None:
        self.index = index
        self.next_index = 0
        self.chain = prompt_chain
        self.text_bytes = 0
        self.finish = FinishReason.NONE
        self._text = text
        self._text_stopped = False

    @property
    def place(self) -> PlaceValues:
        return self.next_index, self.chain, self.text_bytes

    def resume(self, tokens: Sequence[int], chain: int | None, text_bytes: int | None) -> None:
        """Goes to where a client has been before. Without `text_bytes`, the text begins with the next token's."""
        self.chain = extend_chain(self.chain, tokens)
        if chain is not None and chain != self.chain:
            raise HistoryLost("what this client has received is not what the journal holds: start again")
        self.next_index = len(tokens)
        if text_bytes is None:
            delta = self._text.push(tokens)
            self.text_bytes = len(delta.text.encode())
        else:
            delta = self._text.resume(tokens, text_bytes)
            self.text_bytes = text_bytes
        self._text_stopped = delta.stopped

    def push(
        self, first_index: int, token_ids: Sequence[int], chain: int | None, finish: FinishReason
    ) -> BranchPiece | None:
        """What is new in a run of tokens that begins at or before the next index; None if nothing is.

        `chain` is the one after the run, None if it is not known.
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
            raise HistoryLost(f"branch {self.index} differs from the journal before index {self.next_index}")
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
        return BranchPiece(first, new, text, self.finish, self.place)
