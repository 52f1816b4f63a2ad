"""Harmony, the form of outputs of gpt-oss: messages in channels, each a header and a body between special tokens.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json
    <|message|>{…}<|call|>

A header says what its body is: reasoning (analysis), a call (to=functions.NAME), or else content.
"""

import re
from collections.abc import Iterable

from router.tools.parts import CallArguments, CallStart, Content, Part, Reasoning

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
BODY_ENDS = ("<|end|>", "<|call|>", "<|return|>", START, CHANNEL)
HEADER_BEGINS = (CHANNEL, START, MESSAGE, "to=")
MAX_HEADER = 512  # characters
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")


class HarmonyParser:
    """Divides one output, as OutputParser does. The prompt ends with the beginning of a header."""

    def __init__(self, *, has_tools: bool) -> None:
        """Without tools, calls are content."""
        self._has_tools = has_tools
        self._held = ""
        self._blank: list[str] = []  # white space at the output's beginning, before `_held`
        self._step = self._begin
        self._kind: type[Content] | type[Reasoning] | type[CallArguments] = Content
        self._has_body = False
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        """The parts that are sure now."""
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self, *, was_cut: bool = False) -> list[Part]:
        """The rest. A header without a body says nothing."""
        parts: list[Part] = []
        if self._step == self._begin:
            self._held, self._step = "".join((*self._blank, self._held)), self._body
        if self._step == self._body:
            self._show(self._held, parts)
            self._close(parts)
        self._held = ""
        return parts

    # Each step returns whether another may follow.

    def _begin(self, parts: list[Part]) -> bool:
        """An output that begins as no header does is content."""
        text = self._held.lstrip()
        if len(text) < len(self._held):
            self._blank.append(self._held[: len(self._held) - len(text)])
            self._held = text
        if not text or any(mark.startswith(text[: len(mark)]) and len(text) < len(mark) for mark in HEADER_BEGINS):
            return False
        self._step = self._header if text.startswith(HEADER_BEGINS) else self._body
        self._held, self._blank = "".join((*self._blank, text)), []
        return True

    def _header(self, parts: list[Part]) -> bool:
        place = self._held.find(MESSAGE, 0, MAX_HEADER)
        if place < 0 and len(self._held) < MAX_HEADER:
            return False
        if place < 0:  # no header is so long
            self._kind, self._step = Content, self._body
            self._show(self._held[:MAX_HEADER], parts)
            self._held = self._held[MAX_HEADER:]
            return True
        header, self._held = self._held[:place], self._held[place + len(MESSAGE) :]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._has_body, self._step = False, self._body
        if recipient is not None and self._has_tools:
            self._kind = CallArguments
            self.num_calls += 1
            parts.append(CallStart(recipient[1]))
        else:
            self._kind = Reasoning if channel is not None and channel[1] == "analysis" else Content
        return True

    def _body(self, parts: list[Part]) -> bool:
        places = [(place, mark) for mark in BODY_ENDS if (place := self._held.find(mark)) >= 0]
        if not places:
            sure = len(self._held) - _overlap(self._held)
            self._show(self._held[:sure], parts)
            self._held = self._held[sure:]
            return False
        place, mark = min(places)
        self._show(self._held[:place], parts)
        self._close(parts)
        self._held = self._held[place if mark in (START, CHANNEL) else place + len(mark) :]
        self._step = self._between
        return True

    def _between(self, parts: list[Part]) -> bool:
        """Between messages only headers stand; what is none of them is left out."""
        places = [place for mark in (START, CHANNEL) if (place := self._held.find(mark)) >= 0]
        if not places:
            self._held = self._held[len(self._held) - _overlap(self._held) :]
            return False
        self._held, self._step = self._held[min(places) :], self._header
        return True

    def _show(self, text: str, parts: list[Part]) -> None:
        if text:
            self._has_body = True
            parts.append(self._kind(text))

    def _close(self, parts: list[Part]) -> None:
        if self._kind is CallArguments and not self._has_body:
            parts.append(CallArguments("{}"))
        self._has_body = True


def _overlap(text: str) -> int:
    """How many characters at the end may be the beginning of a mark."""
    most = min(len(text), max(map(len, BODY_ENDS)) - 1)
    return next((size for size in range(most, 0, -1) if any(mark.startswith(text[-size:]) for mark in BODY_ENDS)), 0)


class HarmonyCounter:
    """Counts the tokens of messages in the channel of analysis, from the mark of the channel to that of the end."""

    def __init__(self) -> None:
        self._header: bytes | None = b""  # of the message that is being read; None: its body is
        self._num_header = 0
        self._is_analysis = False
        self.num_tokens = 0

    def add(self, tokens: Iterable[bytes]) -> None:
        ends = {mark.encode() for mark in BODY_ENDS}
        for token in tokens:
            if self._header is None:
                self.num_tokens += self._is_analysis and token not in (START.encode(), CHANNEL.encode())
                if token in ends:
                    self._header, self._num_header, self._is_analysis = b"", 0, False
            if self._header is not None:
                self._read_header(token)

    def _read_header(self, token: bytes) -> None:
        if token == CHANNEL.encode():
            self._header, self._num_header = b"", 0
        self._header = (self._header or b"")[-MAX_HEADER:] + token
        self._num_header += 1
        if token == MESSAGE.encode():
            self._is_analysis = self._header.startswith(CHANNEL.encode() + b"analysis")
            self._is_analysis &= b"to=functions." not in self._header
            self.num_tokens += self._num_header if self._is_analysis else 0
            self._header = None

    def finish(self) -> int:
        return self.num_tokens
