"""Divides an output into content, reasoning and calls of tools, as its text comes.

What the parts say is a function of the whole text alone: however the text was divided when it came, contents join to
the same content, and calls are the same and have the same places. So a stream and a whole answer agree, and so do a
stream and the one that another router goes on with. Nothing that was said is ever taken back.
"""

from collections.abc import Sequence

from router.tools.formats import ToolFormat
from router.tools.harmony import HarmonyParser
from router.tools.parts import CallStart, Content, Part, Reasoning
from router.tools.reasoning import HARMONY, ReasoningFormat
from router.tools.sections.call_texts import Schemas
from router.tools.sections.json_section import JsonSection, Progress
from router.tools.sections.whole_section import WholeSection


class OutputParser:
    """The parser of one output."""

    def __init__(
        self,
        tools: ToolFormat | None,
        schemas: Schemas,
        reasoning: ReasoningFormat | None = None,
        *,
        begins_inside: bool = False,
    ) -> None:
        """Without `tools` no calls are looked for. `begins_inside`: the prompt ends where reasoning begins."""
        self._tools = tools
        self._schemas = schemas
        self._reasoning = reasoning
        self._kind: type[Content] | type[Reasoning] = Reasoning if begins_inside and reasoning else Content
        self._begun = False  # the content or the reasoning has text: before that, white space is left out
        self._section: JsonSection | WholeSection | None = None
        self._before = ""  # what stood before the section's own text: white space, and its mark
        self._stray = ""  # a mark that may still end a section of which the calls have ended
        self._blank: list[str] = []  # white space before `_held`: apart, so that no push reads it again
        self._held = ""  # text whose meaning the next text may change
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        """The parts that are sure now."""
        self._held += text
        parts: list[Part] = []
        while True:
            state = len(self._held), self._section, self._kind
            parts += self._take_calls(self._section) if self._section else self._take_text()
            if state == (len(self._held), self._section, self._kind):
                return parts

    def finish(self, *, was_cut: bool = False) -> list[Part]:
        """The rest. What was cut between a mark and the name of a call is no call, and no content either."""
        section, self._section = self._section, None
        rest, self._held = self._with_blank(self._held), ""
        if section is None:
            return self._text(rest)
        found = section.finish(was_cut=was_cut)
        if was_cut and self._before.strip():
            self._before = section.content = ""
        return self._parts_of(section, found)

    def _take_text(self) -> list[Part]:
        """Takes content, or reasoning, up to a mark or to what may become one."""
        marks = self._marks()
        places = ((self._held.find(mark), mark) for mark in marks)
        found = min(((place, mark) for place, mark in places if place >= 0 and self._counts(place, mark)), default=None)
        if found is not None:
            return self._take_mark(*found)
        sure = len(self._held) - _overlap(self._held, marks)
        text, self._held = self._held[:sure], self._held[sure:]
        shown = text.rstrip()  # white space before a mark is left out
        parts = self._text(self._with_blank(shown)) if shown else []
        if len(shown) < len(text):
            self._blank.append(text[len(shown) :])
        return parts

    def _with_blank(self, text: str) -> str:
        """The text with the white space before it, which is taken."""
        blank, self._blank = self._blank, []
        return "".join((*blank, text))

    def _take_mark(self, place: int, mark: str) -> list[Part]:
        before = self._with_blank(self._held[:place])
        shown = before.rstrip()
        parts = self._text(shown)
        self._held = self._held[place + len(mark) :]
        if mark == self._stray:
            self._stray = ""
        elif self._reasoning is not None and mark in (self._reasoning.begin, self._reasoning.end):
            self._kind, self._begun = Reasoning if mark == self._reasoning.begin else Content, False
        elif self._tools is not None:
            self._section = self._tools.section(self._schemas)
            self._before, self._stray = before[len(shown) :], ""
            if self._tools.keeps(mark):
                parts += self._section.push(mark)
            else:
                self._before += mark
        return parts

    def _take_calls(self, section: JsonSection | WholeSection) -> list[Part]:
        text, self._held = self._held, ""
        found = section.push(text)
        if section.progress is not Progress.OPEN:
            self._section, self._held = None, section.rest
        return self._parts_of(section, found)

    def _parts_of(self, section: JsonSection | WholeSection, found: list[Part]) -> list[Part]:
        """What a section says: its calls, and what was none of them."""
        self.num_calls += sum(isinstance(part, CallStart) for part in found)
        if section.progress is Progress.FAILED:
            return self._text(self._before + section.content)
        if section.progress is Progress.ENDED:
            self._stray = "" if section.ended_at_mark or self._tools is None else self._tools.end
            return [*found, *self._text(section.content)]
        return found

    def _text(self, text: str) -> list[Part]:
        text = text if self._begun else text.lstrip()
        if not text:
            return []
        self._begun = True
        return [self._kind(text)]

    def _marks(self) -> tuple[str, ...]:
        """What would end the text that is being read."""
        reasoning, tools = self._reasoning, self._tools
        if self._kind is Reasoning and reasoning is not None:
            return (reasoning.end,)
        calls = () if tools is None or (tools.at_start and (self._begun or self.num_calls)) else tools.begins
        stray = (self._stray,) if self._stray else ()
        may_reason = reasoning is not None and not self._begun and not self.num_calls
        return (*calls, *stray, reasoning.begin) if may_reason and reasoning is not None else (*calls, *stray)

    def _counts(self, place: int, mark: str) -> bool:
        """Whether a mark at a place ends the text before it."""
        reasoning = self._reasoning
        if reasoning is not None and mark in (reasoning.begin, reasoning.end):
            starts_only = mark == reasoning.begin
        else:
            starts_only = self._tools is not None and self._tools.at_start and mark != self._stray
        return not starts_only or not self._held[:place].strip()


def _overlap(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a mark."""
    most = min(len(text), max((len(mark) - 1 for mark in marks), default=0))
    return next((size for size in range(most, 0, -1) if any(mark.startswith(text[-size:]) for mark in marks)), 0)


def parser_for(
    tools: ToolFormat | None, schemas: Schemas, reasoning: ReasoningFormat | None = None, *, begins_inside: bool = False
) -> OutputParser | HarmonyParser:
    """The parser of one output in these formats."""
    if HARMONY in (reasoning.name if reasoning else "", tools.name if tools else ""):
        return HarmonyParser(has_tools=tools is not None)
    return OutputParser(tools, schemas, reasoning, begins_inside=begins_inside)
