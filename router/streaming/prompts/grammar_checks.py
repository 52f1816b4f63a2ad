"""Whether the constraints of requests can be kept: beside the event loop, and few at once."""

import asyncio
from collections import OrderedDict
from dataclasses import replace

from octavo.request.errors import InvalidArgument
from octavo.request.sampling import Constraint
from octavo.text import grammar

AT_ONCE = 2
MOST_KNOWN_BYTES = 8 << 20  # of the texts of constraints that were checked
ABOUT_ERROR_BYTES = 1024  # what one counts beside its text: many may be short


class GrammarChecks:
    """Checks constraints. One that was checked is not checked again soon, whatever was found."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(AT_ONCE)
        self._known: OrderedDict[Constraint, InvalidArgument | None] = OrderedDict()  # why one cannot be kept
        self._num_bytes = 0

    async def checked(self, asked: Constraint) -> Constraint:
        """The constraint with the engine that makes its masks. Raises InvalidArgument with the keyword."""
        constraint = replace(asked, engine=grammar.engine())
        if constraint not in self._known:
            async with self._room:
                self._note(constraint, await asyncio.to_thread(_complaint, constraint))
        else:
            self._known.move_to_end(constraint)
        if (complaint := self._known[constraint]) is not None:
            raise complaint.inside("sampling")
        return constraint

    def _note(self, constraint: Constraint, complaint: InvalidArgument | None) -> None:
        if constraint not in self._known:
            self._num_bytes += _size(constraint)
        self._known[constraint] = complaint
        while self._num_bytes > MOST_KNOWN_BYTES:
            self._num_bytes -= _size(self._known.popitem(last=False)[0])


def _complaint(constraint: Constraint) -> InvalidArgument | None:
    """Why the constraint cannot be kept; None: it can."""
    try:
        grammar.check_grammar(constraint)
    except InvalidArgument as error:
        return error.with_traceback(None)
    return None


def _size(constraint: Constraint) -> int:
    return len(constraint.text) + ABOUT_ERROR_BYTES
