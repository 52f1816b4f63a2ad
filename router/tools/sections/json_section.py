"""Reads the calls between two marks whose arguments are JSON, as their text comes.

A call begins where its name is known and its arguments begin as those of a call; from there on each piece of them is
sure. An object of another form (arguments before the name, a text of JSON as arguments) is read when it is whole.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from router.tools.parts import CallArguments, CallStart, Part
from router.tools.sections.call_texts import json_calls
from router.tools.sections.json_scanner import Found, JsonScanner

MAX_HEAD = 512  # characters before the arguments of a call whose name stands in plain text
ARGUMENTS = r'(?=\{\s{0,16}["}])'  # as those of a call begin
_OBJECT = re.compile(
    r'\{\s{0,16}(?:"type"\s{0,16}:\s{0,16}"function"\s{0,16},\s{0,16})?"name"\s{0,16}:\s{0,16}"(?P<name>[^"\\]{1,128})"'
    r'\s{0,16},\s{0,16}"(?:arguments|parameters)"\s{0,16}:\s{0,16}' + ARGUMENTS
)
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class JsonShape:
    """How calls stand between the marks."""

    fillers: tuple[str, ...] = ("[", "]", ",", ";")  # stand before, between and after calls; longer ones first
    heads: tuple[re.Pattern[str], ...] = ()  # each has the name of a call in plain text, and ends before its arguments
    has_objects: bool = True  # a call may be an object with name and arguments


class Progress(Enum):
    """How far a section is."""

    OPEN = 0
    ENDED = 1  # it had calls
    FAILED = 2  # it had none: its mark is content, too


class JsonSection:
    """The reader of one section, from the mark on that begins it."""

    def __init__(self, shape: JsonShape, end: str, known: Mapping[str, object] | None = None) -> None:
        """An `end` that is empty: the section goes on to the output's end. `known`: no other names are calls."""
        self._shape = shape
        self._end = end
        self._known = known
        self._text = ""
        self._place = 0  # in the text: what stands before it has been read
        self._scanner: JsonScanner | None = None
        self._step = self._between
        self._in_object = False  # the arguments that are being read are inside an object
        self._sent = 0  # in the text: arguments before it have been sent
        self._num_calls = 0
        self.progress = Progress.OPEN
        self.content = ""  # of a section that is over: what was no call
        self.rest = ""  # what stands after it
        self.ended_at_mark = False

    def push(self, text: str) -> list[Part]:
        """The parts that are sure now."""
        self._text += text
        parts: list[Part] = []
        while self.progress is Progress.OPEN and self._step(parts):
            pass
        if self._num_calls and self.progress is Progress.OPEN:
            self._forget_read()
        return parts

    def finish(self, *, was_cut: bool) -> list[Part]:
        """The output has ended. A call that was cut has the arguments that there are."""
        if self.progress is not Progress.OPEN:
            return []
        parts: list[Part] = []
        if self._step == self._arguments and self._sent < len(self._text):
            parts.append(CallArguments(self._text[self._sent :]))
        if self._step != self._head:
            self._place = len(self._text)
        self._leave(len(self._text))
        return parts

    # Each step returns whether another may follow; False: it needs more text, or the section is over.

    def _between(self, parts: list[Part]) -> bool:
        text = self._text
        while True:
            found = _SPACE.match(text, self._place)
            self._place = found.end() if found else self._place
            if self._place == len(text):
                return False
            for mark in (self._end, *self._shape.fillers):
                if mark and text.startswith(mark, self._place):
                    break
                if mark and mark.startswith(text[self._place : self._place + len(mark)]):
                    return False  # it may become this mark
            else:
                self._step = self._head
                return True
            self._place += len(mark)
            if mark == self._end:
                return self._leave(self._place, at_mark=True)

    def _head(self, parts: list[Part]) -> bool:
        text, shape = self._text, self._shape
        if shape.has_objects and text[self._place] == "{":
            found = _OBJECT.match(text, self._place)
            if found is not None:
                return self._begin(found, parts, in_object=True)
            return self._whole_object(parts)
        if not shape.heads:
            return self._leave(self._place)
        end = text.find(self._end, self._place) if self._end else -1
        for head in shape.heads:
            found = head.match(text, self._place, len(text) if end < 0 else end)
            if found is not None:
                return self._begin(found, parts, in_object=False)
        if end >= 0:
            return self._leave(end + len(self._end), at_mark=True)
        return self._leave(self._place + MAX_HEAD) if len(text) - self._place >= MAX_HEAD else False

    def _begin(self, found: re.Match[str], parts: list[Part], *, in_object: bool) -> bool:
        name = found["name"].strip()
        if not name or (self._known is not None and name not in self._known):
            return self._leave(found.end())
        self._num_calls += 1
        parts.append(CallStart(name))
        self._in_object, self._sent = in_object, found.end()
        self._scanner, self._step = JsonScanner(found.end(), self._end), self._arguments
        return True

    def _whole_object(self, parts: list[Part]) -> bool:
        if self._scanner is None:
            self._scanner = JsonScanner(self._place, self._end)
        scanner = self._scanner
        found = scanner.scan(self._text)
        if found is None:
            return False
        self._scanner = None
        if found is Found.MARK:
            return self._leave(scanner.place + len(self._end), at_mark=True)
        try:
            calls = json_calls(self._text[self._place : scanner.place], {})
        except ValueError:
            return self._leave(scanner.place)
        if self._known is not None and any(call.name not in self._known for call in calls):
            return self._leave(scanner.place)
        self._num_calls += len(calls)
        for call in calls:
            parts += call.parts
        self._place, self._step = scanner.place, self._between
        return True

    def _arguments(self, parts: list[Part]) -> bool:
        scanner = self._scanner
        if scanner is None:
            raise RuntimeError("arguments without a scanner")
        found = scanner.scan(self._text)
        if scanner.place > self._sent:
            parts.append(CallArguments(self._text[self._sent : scanner.place]))
        self._sent = self._place = scanner.place
        if found is None:
            return False
        self._scanner = None
        self._step = self._after if self._in_object and found is Found.CLOSED else self._between
        return True

    def _after(self, parts: list[Part]) -> bool:
        """After the arguments in an object, which may have more fields."""
        found = _SPACE.match(self._text, self._place)
        self._place = found.end() if found else self._place
        if self._place == len(self._text):
            return False
        following = self._text[self._place]
        self._step = self._skip if following == "," else self._between
        self._place += following == "}"
        return True

    def _skip(self, parts: list[Part]) -> bool:
        """Reads over the fields after the arguments."""
        if self._scanner is None:
            self._scanner = JsonScanner(self._place, self._end, depth=1)
        found, self._place = self._scanner.scan(self._text), self._scanner.place
        if found is None:
            return False
        self._scanner, self._step = None, self._between
        return True

    def _leave(self, place: int, *, at_mark: bool = False) -> bool:
        """Ends the section before a place. What was no call is content, with the mark of a section without calls."""
        begin = min(self._place, place) if self._num_calls else 0
        end = place - len(self._end) if at_mark and self._num_calls else place
        self.content, self.rest = self._text[begin:end], self._text[place:]
        self.ended_at_mark = at_mark
        self.progress = Progress.ENDED if self._num_calls else Progress.FAILED
        return False

    def _forget_read(self) -> None:
        """Lets go of the text that has been read."""
        place = min(self._place, self._sent) if self._step == self._arguments else self._place
        if self._scanner is not None:
            self._scanner.place -= place
        self._text, self._place, self._sent = self._text[place:], self._place - place, self._sent - place
