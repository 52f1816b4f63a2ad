"""What one use of a chat template may cost: so many steps, and so many characters in all the texts that it makes.

    with budgeted(characters_of_the_messages):
        template.render(…)       # raises TemplateTooCostly

Outside of `budgeted` only the size of single texts is bounded.
"""

from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateError

MAX_TEXT = 16 << 20  # characters of one text, or items of one list: more than a request can bring
MAX_WORK = 4 * MAX_TEXT  # of all texts together that one use of a template makes
LEAST_STEPS, MOST_STEPS, STEPS_PER_CHARACTER = 20_000, 2_000_000, 8  # of one use of a template
MAX_DEPTH = 50


class TemplateTooCostly(TemplateError):
    """The template takes too many steps, or makes too large a text."""


class TemplateBudget:
    """What one use of a template may still cost."""

    def __init__(self, characters: int) -> None:
        """`characters` is the size of what the template is given."""
        self._steps = min(LEAST_STEPS + STEPS_PER_CHARACTER * characters, MOST_STEPS)
        self._work = MAX_WORK

    def spend(self, size: int) -> None:
        """Spends one step, and so many characters. Raises TemplateTooCostly when nothing is left."""
        self._steps -= 1
        self._work -= size
        if self._steps < 0:
            raise TemplateTooCostly("it takes too many steps for such a chat")
        if self._work < 0:
            raise TemplateTooCostly(f"it makes texts of more than {MAX_WORK} characters")


_budget: ContextVar[TemplateBudget | None] = ContextVar("template_budget", default=None)


@contextmanager
def budgeted(characters: int) -> Iterator[None]:
    """Within it, templates have a new budget, for messages of so many characters."""
    token = _budget.set(TemplateBudget(characters))
    try:
        yield
    finally:
        _budget.reset(token)


def spend(size: int = 0) -> None:
    """Spends one step of the budget, if there is one, and so many characters."""
    budget = _budget.get()
    if budget is not None:
        budget.spend(size)


def expect_room(size: int) -> None:
    """Raises TemplateTooCostly for a text or a list of more than MAX_TEXT; called before it is made."""
    if size > MAX_TEXT:
        raise TemplateTooCostly(f"it makes a text of more than {MAX_TEXT} characters")


def length_of(value: Any) -> int:
    """The length of a text or a container; 0 for anything else."""
    return len(value) if isinstance(value, Sized) else 0


def size_of(value: Any, depth: int = 0) -> int:
    """About how many characters the value has when it is written as a text, and more than that for texts in lists."""
    if isinstance(value, str | bytes):
        return len(value)
    if not isinstance(value, Mapping | Sequence):
        return 20
    if depth > MAX_DEPTH:
        raise TemplateTooCostly("its values are nested too deep")
    parts = (part for pair in value.items() for part in pair) if isinstance(value, Mapping) else iter(value)
    total = 2
    for part in parts:
        spend()
        total += 2 + size_of(part, depth + 1)
        expect_room(total)
    return total
