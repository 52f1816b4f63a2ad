"""Checks of constraints: what was found is remembered, within a bound."""

import pytest

from octavo.request.errors import InvalidArgument
from octavo.request.sampling import Constraint, Shape
from octavo.text import grammar
from router.streaming.prompts import grammar_checks
from router.streaming.prompts.grammar_checks import GrammarChecks

GOOD = Constraint(Shape.JSON_OBJECT)
BAD = Constraint(Shape.JSON_SCHEMA, '{"uniqueItems": true}')


@pytest.fixture
def checked(monkeypatch):
    """The constraints that were checked, in order."""
    found, check = [], grammar.check_grammar
    monkeypatch.setattr(grammar, "check_grammar", lambda each: (found.append(each.shape), check(each)))
    return found


async def test_what_was_found_is_not_looked_for_again_within_a_bound(checked, monkeypatch):
    checks, said = GrammarChecks(), set()
    for _ in range(3):
        assert (await checks.checked(GOOD)).engine
        with pytest.raises(InvalidArgument, match=r"^sampling\.constraint\.json_schema: .*uniqueItems") as raised:
            await checks.checked(BAD)
        said.add(str(raised.value))
    assert (len(said), checked) == (1, [Shape.JSON_OBJECT, Shape.JSON_SCHEMA])
    checked.clear()
    monkeypatch.setattr(grammar_checks, "MOST_KNOWN_BYTES", 2 * grammar_checks.ABOUT_ERROR_BYTES)
    checks = GrammarChecks()
    for constraint in (GOOD, Constraint(Shape.REGEX, "a"), Constraint(Shape.REGEX, "b"), GOOD):
        await checks.checked(constraint)
    assert len(checked) == 4 and checks._num_bytes <= grammar_checks.MOST_KNOWN_BYTES
