"""Finds the end of a JSON object in text that still comes, and reads no character twice."""

import re
from enum import Enum

_IN_TEXT = re.compile(r'["\\]')


class Found(Enum):
    """What stands where the scanner has stopped."""

    CLOSED = 1  # the object has ended before this place
    MARK = 2  # the mark that ends a section of calls begins here: the object has no end


class JsonScanner:
    """Goes over the text of one object. What is inside of its strings neither closes it nor is a mark."""

    def __init__(self, place: int, end_mark: str, depth: int = 0) -> None:
        self.place = place  # all before it has been read, and can be no part of a mark
        self._depth = depth
        self._in_text = False
        self._room = max(0, len(end_mark) - 1)
        marks = f"|{re.escape(end_mark)}" if end_mark else ""
        self._outside = re.compile(rf'["{{}}\[\]]{marks}')

    def scan(self, text: str) -> Found | None:
        """Goes on over the text, which begins as it did before. None: its end is not there yet."""
        while True:
            if self._in_text:
                if not self._leave_text(text):
                    return None
                continue
            found = self._outside.search(text, self.place)
            if found is None:
                self.place = max(self.place, len(text) - self._room)
                return None
            if len(found.group()) > 1:
                self.place = found.start()
                return Found.MARK
            self.place = found.end()
            if found.group() == '"':
                self._in_text = True
                continue
            self._depth += 1 if found.group() in "{[" else -1
            if self._depth <= 0:
                return Found.CLOSED

    def _leave_text(self, text: str) -> bool:
        found = _IN_TEXT.search(text, self.place)
        if found is None:
            self.place = len(text)
            return False
        if found.group() == '"':
            self.place, self._in_text = found.end(), False
            return True
        self.place = found.start() if found.end() == len(text) else found.end() + 1
        return found.end() < len(text)
