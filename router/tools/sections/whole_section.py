"""Reads the calls between two marks when their text is whole: for formats whose arguments are no JSON."""

from router.tools.parts import Part
from router.tools.sections.call_texts import Reader, Schemas
from router.tools.sections.json_section import Progress


class WholeSection:
    """The reader of one section, as JsonSection is one."""

    def __init__(self, read: Reader, schemas: Schemas, end: str) -> None:
        self._read = read
        self._schemas = schemas
        self._end = end
        self._text = ""
        self._searched = 0
        self.progress = Progress.OPEN
        self.content = ""
        self.rest = ""
        self.ended_at_mark = False

    def push(self, text: str) -> list[Part]:
        self._text += text
        if not self._end:
            return []
        place = self._text.find(self._end, self._searched)
        self._searched = max(0, len(self._text) - len(self._end) + 1)
        if place < 0:
            return []
        self.ended_at_mark = True
        return self._close(place, place + len(self._end))

    def finish(self, *, was_cut: bool) -> list[Part]:
        """The output has ended. Calls whose mark has not come do not count if it was cut."""
        if was_cut and self._end:
            self.progress, self.content = Progress.FAILED, self._text
            return []
        return self._close(len(self._text), len(self._text))

    def _close(self, end: int, after: int) -> list[Part]:
        self.rest = self._text[after:]
        try:
            calls = self._read(self._text[:end], self._schemas)
        except (ValueError, TypeError, AttributeError, RecursionError):
            self.progress, self.content = Progress.FAILED, self._text[:after]
            return []
        self.progress = Progress.ENDED
        return [part for call in calls for part in call.parts]
