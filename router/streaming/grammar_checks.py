"""Whether the constraints of requests can be kept: beside the event loop, and few at once."""

import asyncio
from collections import OrderedDict
from dataclasses import replace

from octavo.request.errors import InvalidArgument
from octavo.request.sampling import Constraint
from octavo.text import grammar

AT_ONCE = 2
MOST_KNOWN_BYTES = 8 << 20  # of the texts of constraints that were found good


class GrammarChecks:
    """Checks constraints. One that was good is not checked again soon."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(AT_ONCE)
        self._known: OrderedDict[Constraint, None] = OrderedDict()
        self._num_bytes = 0

    async def checked(self, asked: Constraint) -> Constraint:
        """The constraint with the engine that makes its masks. Raises InvalidArgument with the keyword."""
        constraint = replace(asked, engine=grammar.engine())
        if constraint in self._known:
            self._known.move_to_end(constraint)
            return constraint
        async with self._room:
            try:
                await asyncio.to_thread(grammar.check_grammar, constraint)
            except InvalidArgument as error:
                raise error.inside("sampling") from None
        self._note(constraint)
        return constraint

    def _note(self, constraint: Constraint) -> None:
        if constraint in self._known:
            return
        self._known[constraint] = None
        self._num_bytes += len(constraint.text)
        while self._num_bytes > MOST_KNOWN_BYTES:
            self._num_bytes -= len(self._known.popitem(last=False)[0].text)
