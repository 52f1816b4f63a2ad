"""Turns tokens into text as they come: in whole characters, and into the same text however the tokens are divided.

In every supported vocabulary a token stands for some bytes, which a ByteTable has. A detokenizer looks up the bytes,
joins them, and feeds an incremental UTF-8 decoder, which keeps an unfinished character until a later token finishes it.
"""

import codecs
import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.request.errors import Mismatch


@dataclass(frozen=True, slots=True)
class ByteTable:
    """The bytes of each token, by id, and which spaces the start of a text loses."""

    table: Sequence[bytes]
    strip: int = 0  # at most this many spaces at the start of a text are dropped
    bare_first: bool = False  # the first token loses all its spaces

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token; none beyond the vocabulary."""
        return self.table[token_id] if token_id < len(self.table) else b""

    def without(self, ids: Iterable[int]) -> "ByteTable":
        """This table with no bytes for `ids`."""
        table = list(self.table)
        for token_id in ids:
            if token_id < len(table):
                table[token_id] = b""
        return replace(self, table=table)


class Detokenizer:
    """The text of one stream of tokens.

    The text is a function of the ids alone: what `push` and `flush` return joins to the same text for any division into
    pushes. An id outside the vocabulary has no text.
    """

    __slots__ = ("_bare_first", "_decoder", "_pending", "_pieces", "_strip")

    def __init__(self, pieces: ByteTable) -> None:
        self._pieces = pieces.table
        self._strip = pieces.strip
        self._bare_first = pieces.bare_first
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = False  # the decoder may hold bytes back

    def without_blank(self) -> "Detokenizer":
        """This one, which is new, and now drops all spaces at the start of the text."""
        self._strip = sys.maxsize
        return self

    def fork(self) -> "Detokenizer":
        """A detokenizer that goes on from here by itself."""
        other = copy.copy(self)
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def push(self, ids: Sequence[int]) -> str:
        """The characters that are complete now. A byte that can be part of no character becomes U+FFFD."""
        try:
            data = b"".join(map(self._pieces.__getitem__, ids))
        except IndexError:
            data = b"".join(self._pieces[token_id] for token_id in ids if token_id < len(self._pieces))
        if self._bare_first and ids:
            data = self._strip_first(ids[0], data)
        if self._strip and data:
            data = self._strip_start(data)
        if not self._pending:
            try:
                return data.decode()
            except UnicodeDecodeError:
                self._pending = True
        text = self._decoder.decode(data)
        self._pending = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """The text of an unfinished character at the end. Tokens pushed later begin a new character."""
        self._pending = False
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text

    def _strip_first(self, token_id: int, data: bytes) -> bytes:
        self._bare_first = False
        first = self._pieces[token_id] if token_id < len(self._pieces) else b""
        return first.replace(b" ", b"") + data[len(first) :]

    def _strip_start(self, data: bytes) -> bytes:
        kept = data.lstrip(b" ")
        dropped = min(len(data) - len(kept), self._strip)
        self._strip = 0 if kept else self._strip - dropped
        return data[dropped:]


def build_byte_table(decoder: Mapping[str, Any] | None, tokens: Sequence[str | None]) -> ByteTable:
    """The table of `tokens`, by the `decoder` of a tokenizer.json. Raises Mismatch if its kind is not supported."""
    steps = list(_flatten(decoder))
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteTable([b"" if token is None else _from_byte_alphabet(token) for token in tokens])
    if [step["type"] for step in steps] == ["Metaspace"]:
        mark = steps[0]["replacement"]
        table = [b"" if token is None else token.replace(mark, " ").encode() for token in tokens]
        return ByteTable(table, bare_first=steps[0].get("prepend_scheme", "always") != "never")
    return _sentencepiece(steps, tokens)


def _flatten(decoder: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    if decoder is None:
        raise Mismatch("the tokenizer has no decoder; a byte-level or sentencepiece-style one is needed")
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _flatten(step)
    else:
        yield decoder


def _sentencepiece(steps: Sequence[Mapping[str, Any]], tokens: Sequence[str | None]) -> ByteTable:
    replaced: list[tuple[str, str]] = []
    byte_fallback, fused, strip = False, False, 0
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"] and not fused:
            replaced.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and step["content"] == " " and not step["stop"]:
            strip += step["start"]
        else:
            raise Mismatch(f"the tokenizer's decoder has a step {kind} that cannot be streamed")
    return ByteTable([_piece(token, replaced, byte_fallback) for token in tokens], strip)


def _piece(token: str | None, replaced: Sequence[tuple[str, str]], byte_fallback: bool) -> bytes:
    if token is None:
        return b""
    if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass  # an ordinary token that looks like a byte
    for old, new in replaced:
        token = token.replace(old, new)
    return token.encode()


def byte_alphabet() -> dict[str, int]:
    """The 256 printable characters in which byte-level vocabularies are written, with the byte that each stands for.

    A printable character of Latin-1 stands for itself. The characters from U+0100 on are the other bytes, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = byte_alphabet()


def _from_byte_alphabet(token: str) -> bytes:
    try:
        return bytes(map(_BYTES.__getitem__, token))
    except KeyError:
        return token.encode()  # an added token, which is written as plain text
