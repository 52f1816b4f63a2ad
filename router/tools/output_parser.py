"""Divides an output into content, reasoning and calls of tools, as its text comes.

What the parts say is a function of the whole text alone: however the text was divided when it came, contents join to
the same content, and calls are the same and have the same places. So a stream and a whole answer agree, and so do a
stream and the one that another router goes on with.
"""

from collections.abc import Sequence

from router.tools.call_texts import Schemas
from router.tools.formats import ToolFormat
from router.tools.parts import Content, Part, Reasoning

THINK, THOUGHT = "<think>", "</think>"


class OutputParser:
    """The parser of one output."""

    def __init__(
        self, tools: ToolFormat | None, schemas: Schemas, *, has_reasoning: bool = False, begins_inside: bool = False
    ) -> None:
        """Without `tools` no calls are looked for. `begins_inside`: the prompt ends where reasoning begins."""
        self._tools = tools
        self._schemas = schemas
        self._has_reasoning = has_reasoning or begins_inside
        self._kind: type[Content] | type[Reasoning] = Reasoning if begins_inside else Content
        self._begun = False  # the content or the reasoning has text: before that, white space is left out
        self._inside = ""  # the mark that began a section of calls; empty: outside
        self._space = ""  # what stood before it
        self._held = ""  # text whose meaning the next text may change
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        """The parts that are sure now."""
        self._held += text
        parts: list[Part] = []
        while True:
            state = len(self._held), self._inside, self._kind
            parts += self._take_calls() if self._inside else self._take_text()
            if state == (len(self._held), self._inside, self._kind):
                return parts

    def finish(self, *, was_cut: bool = False) -> list[Part]:
        """The rest. Calls that were not closed count unless the output was cut in the middle of them."""
        rest, inside, self._held, self._inside = self._held, self._inside, "", ""
        if not inside:
            return self._text(rest)
        is_open = self._tools is not None and self._tools.end != ""
        return self._calls_or_text(inside, rest, "", may_be_calls=not (was_cut and is_open))

    def _take_text(self) -> list[Part]:
        """Takes content, or reasoning, up to a mark or to what may become one."""
        marks = self._marks()
        places = ((self._held.find(mark), mark) for mark in marks)
        found = min(((place, mark) for place, mark in places if place >= 0 and self._counts(place, mark)), default=None)
        if found is not None:
            place, mark = found
            before = self._held[:place]
            parts, self._space = self._text(before.rstrip()), before[len(before.rstrip()) :]
            self._held = self._held[place + len(mark) :]
            if mark in (THINK, THOUGHT):
                self._kind, self._begun = Reasoning if mark == THINK else Content, False
            else:
                self._inside = mark
            return parts
        sure = len(self._held) - _overlap(self._held, marks)
        sure = len(self._held[:sure].rstrip())  # white space before a mark is left out
        text, self._held = self._held[:sure], self._held[sure:]
        return self._text(text)

    def _take_calls(self) -> list[Part]:
        end = self._tools.end if self._tools is not None else ""
        body, mark, rest = self._held.partition(end) if end else (self._held, "", "")
        if not mark:
            return []
        inside, self._inside, self._held = self._inside, "", rest
        return self._calls_or_text(inside, body, mark)

    def _calls_or_text(self, inside: str, body: str, mark: str, may_be_calls: bool = True) -> list[Part]:
        tools = self._tools
        if tools is not None and may_be_calls:
            try:
                calls = tools.read(inside + body if tools.keeps_begin and inside[0] != "<" else body, self._schemas)
            except ValueError:
                pass
            else:
                self.num_calls += len(calls)
                return list(calls)
        return self._text(self._space + inside + body + mark)

    def _text(self, text: str) -> list[Part]:
        text = text if self._begun else text.lstrip()
        if not text:
            return []
        self._begun = True
        return [self._kind(text)]

    def _marks(self) -> tuple[str, ...]:
        """What would end the text that is being read."""
        if self._kind is Reasoning:
            return (THOUGHT,)
        tools = self._tools
        calls = () if tools is None or (tools.at_start and (self._begun or self.num_calls)) else tools.begins
        return (*calls, THINK) if self._has_reasoning and not self._begun and not self.num_calls else calls

    def _counts(self, place: int, mark: str) -> bool:
        """Whether a mark at a place ends the text before it."""
        starts_only = mark == THINK or (mark != THOUGHT and self._tools is not None and self._tools.at_start)
        return not starts_only or not self._held[:place].strip()


def _overlap(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a mark."""
    most = min(len(text), max((len(mark) - 1 for mark in marks), default=0))
    return next((size for size in range(most, 0, -1) if any(mark.startswith(text[-size:]) for mark in marks)), 0)
