"""Reads the calls between two marks when their text is whole: for formats whose arguments are no JSON."""

import re

from router.tools.parts import Part
from router.tools.sections.call_texts import Reader, Schemas
from router.tools.sections.json_section import Progress

_ENDS_TEXT = {quote: re.compile(rf"\\.|{quote}|\n", re.DOTALL) for quote in "\"'"}


class WholeSection:
    """The reader of one section, as JsonSection is one. It reads no character twice before it has the whole text."""

    def __init__(self, read: Reader, schemas: Schemas, end: str, *, skips_texts: bool = False) -> None:
        """`skips_texts`: a mark in a text between quotes, which ends on its line, is none."""
        self._read = read
        self._schemas = schemas
        self._end = end
        self._outside = re.compile(re.escape(end) + ("|[\"']" if skips_texts else ""))
        self._quote = ""  # with which the text began in which the reader is
        self._pieces: list[str] = []  # what has been searched
        self._left = ""  # and what comes after it
        self.progress = Progress.OPEN
        self.content = ""
        self.rest = ""
        self.ended_at_mark = False

    def push(self, text: str) -> list[Part]:
        if not self._end:
            self._pieces.append(text)
            return []
        text, place = self._left + text, 0
        while (found := (_ENDS_TEXT[self._quote] if self._quote else self._outside).search(text, place)) is not None:
            place = found.end()
            if found.group() == self._end and not self._quote:
                self.ended_at_mark, self._left = True, ""
                return self._close(text[: found.start()], text[found.start() : place], text[place:])
            if self._quote:
                self._quote = self._quote if found.group().startswith("\\") else ""
            else:
                self._quote = found.group()
        room = len(text) - len(self._end) + 1 if not self._quote else len(text) - text.endswith("\\")
        searched = max(place, room)
        self._pieces.append(text[:searched])
        self._left = text[searched:]
        return []

    def finish(self, *, was_cut: bool) -> list[Part]:
        """The output has ended. Calls whose mark has not come do not count if it was cut."""
        if was_cut and self._end:
            self.progress, self.content = Progress.FAILED, "".join((*self._pieces, self._left))
            return []
        return self._close(self._left, "", "")

    def _close(self, last: str, mark: str, rest: str) -> list[Part]:
        """The section ends before the mark."""
        text = "".join((*self._pieces, last))
        self.rest = rest
        try:
            calls = self._read(text, self._schemas)
        except (ValueError, TypeError, AttributeError, RecursionError):
            self.progress, self.content = Progress.FAILED, text + mark
            return []
        self.progress = Progress.ENDED
        return [part for call in calls for part in call.parts]
