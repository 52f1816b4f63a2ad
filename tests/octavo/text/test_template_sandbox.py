"""Templates that run for ever or fill the memory are refused, soon and with little memory; those of models are not."""

import resource
import time

import pytest

from octavo.errors import InvalidArgument
from octavo.text.chat import ChatTemplate

GROWING = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = WHAT %}{% endfor %}{{ n.x | length }}"
COSTLY = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops over a text": "{% set s = 'a' * 9999 %}{% for i in s %}{% for j in s %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for i in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "macros that call themselves twice": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "macros that fan out": "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}{% set b = f(n - 1) %}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "doubling by ~": GROWING.replace("WHAT", "n.x ~ n.x"),
    "doubling by +": GROWING.replace("WHAT", "n.x + n.x"),
    "doubling a list": GROWING.replace("'ab'", "[1, 2]").replace("WHAT", "n.x + n.x"),
    "doubling by *": GROWING.replace("WHAT", "n.x * 2"),
    "doubling by format": GROWING.replace("WHAT", "'%s%s' % (n.x, n.x)"),
    "doubling by the method format": GROWING.replace("WHAT", "'{0}{0}'.format(n.x)"),
    "doubling by the filter format": GROWING.replace("WHAT", "'%s%s' | format(n.x, n.x)"),
    "doubling by join": GROWING.replace("WHAT", "[n.x, n.x] | join"),
    "growing by the method join": GROWING.replace("WHAT", "n.x.join([n.x, n.x])"),
    "growing by replace": GROWING.replace("WHAT", "n.x.replace('', n.x)"),
    "growing by the filter replace": GROWING.replace("WHAT", "n.x | replace('a', n.x)"),
    "doubling by a block": GROWING.replace("{% set n.x = WHAT %}", "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"),
    "nesting": GROWING.replace("WHAT", "[n.x, n.x]").replace("| length", "| string"),
    "a list of lists as a text": "{{ [range(99999) | list] * 99999 }}",
    "a great text": "{{ 'x' * 10 ** 10 }}",
    "a great list": "{% set x = [0] * 10 ** 9 %}",
    "a great number": "{{ 10 ** (10 ** 9) }}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "powers": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x ** 3 %}{% endfor %}",
    "a width in a format": "{{ '%999999999d' % 1 }}",
    "a width as an argument": "{{ '%*d' % (10 ** 9, 1) }}",
    "a width in the method format": "{{ '{:>999999999}'.format(1) }}",
    "a nested width": "{{ '{:>{}}'.format(1, 10 ** 9) }}",
    "ljust": "{{ 'a'.ljust(10 ** 9) }}",
    "zfill": "{{ 'a'.zfill(10 ** 9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "tojson": "{{ messages | tojson(indent=10 ** 9) }}",
    "indent": "{{ ('a\n' * 999) | indent(10 ** 9) }}",
    "batch": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "slice": "{{ [1] | slice(10 ** 9) | list }}",
    "round": "{{ 1.5 | round(10 ** 9, 'ceil') }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 9, 'big') }}",
}


@pytest.mark.parametrize("source", COSTLY.values(), ids=COSTLY)
def test_a_costly_template_is_refused(source: str) -> None:
    began, most = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidArgument, match="template"):
        ChatTemplate(source, {}).render([("user", "hi")], True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 512 << 10, "KiB more than ever before"
    assert time.process_time() - began < 60, "a hang"


@pytest.mark.parametrize(
    "source", ["{{ lipsum(9) }}", "{{ 'a' | center(9) }}", "{{ [1] | sum }}", "{{ 'a'.translate({}) }}"]
)
def test_what_no_chat_needs_is_missing(source: str) -> None:
    with pytest.raises(InvalidArgument):
        ChatTemplate(source, {}).render([("user", "hi")], True)


def test_a_long_chat_has_a_larger_budget() -> None:
    source = (
        "{% for m in messages %}{% for part in m.content.split(' ') %}{{ '%5s' % part ~ '-' }}{% endfor %}"
        "{{ '{:>9}'.format(m.role) }}{{ [m.role, m.content] | join(', ') | replace('a', 'b') | indent(4) }}{% endfor %}"
    )
    chat = [("user", "a b " * 500)] * 40
    assert len(ChatTemplate(source, {}).render(chat, True)) > 80_000


@pytest.mark.parametrize("source", ["{% for a in b %}" * 60 + "{% endfor %}" * 60, "{{ " + "(" * 5000, "x" * (2 << 20)])
def test_a_template_that_python_cannot_compile_is_refused(source: str) -> None:
    with pytest.raises(InvalidArgument, match="does not compile"):
        ChatTemplate(source, {})
