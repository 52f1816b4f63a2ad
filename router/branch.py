"""How far one client is in one branch: which token comes next, the chain there, and the text that goes with it."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import HistoryLost
from octavo.hashing import extend_chain
from octavo.sampling import FinishReason
from octavo.text.stop import TextStream


@dataclass(slots=True)
class Piece:
    """New tokens of a branch, with the text that has become certain."""

    first_index: int
    token_ids: Sequence[int]
    text: str
    finish: FinishReason


class BranchReader:
    """Takes committed tokens in whatever order and number they come, and passes each on once."""

    __slots__ = ("_text", "chain", "finish", "index", "next_index", "text_bytes")

    def __init__(self, index: int, prompt_chain: int, text: TextStream) -> None:
        self.index = index
        self.next_index = 0
        self.chain = prompt_chain
        self.text_bytes = 0
        self.finish = FinishReason.NONE
        self._text = text

    def resume(self, tokens: Sequence[int], chain: int | None, text_bytes: int | None) -> None:
        """Goes to a place where a client has been before. Without `text_bytes`, the text begins with the next token's."""
        self.chain = extend_chain(self.chain, tokens)
        if chain is not None and chain != self.chain:
            raise HistoryLost("what this client has received is not what the journal holds: start again")
        self.next_index = len(tokens)
        if text_bytes is None:
            self._text.push(tokens)
        else:
            self._text.resume(tokens, text_bytes)
            self.text_bytes = text_bytes

    def has_gap(self, first_index: int) -> bool:
        return first_index > self.next_index

    def push(
        self, first_index: int, token_ids: Sequence[int], chain: int | None, finish: FinishReason
    ) -> Piece | None:
        """What is new in a run of tokens that begins at or before the next index; None if nothing is."""
        if self.finish:
            return None
        new = token_ids[self.next_index - first_index :] if first_index < self.next_index else token_ids
        if not new and not finish:
            return None
        first, self.next_index = self.next_index, self.next_index + len(new)
        before, self.chain = self.chain, extend_chain(self.chain, new)
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
        return Piece(first, new, text, self.finish)
