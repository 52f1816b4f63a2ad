"""Grammars of outputs with calls: one that must come, one in whose place JSON may come, and calls of strict tools.

A grammar is in llguidance's Lark. Reasoning may stand before what a grammar says, where the model writes any.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from octavo.request.errors import InvalidArgument
from octavo.request.sampling import Constraint, Shape
from octavo.request.sampling_validation import parsed_json
from octavo.text.closed_schemas import closed
from router.tools.asked_tools import AskedTools
from router.tools.formats import ToolFormat
from router.tools.output_forms import Division
from router.tools.python_grammars import python_rules
from router.tools.reasoning import ReasoningFormat
from router.tools.tagged_grammars import tagged_rules

SpecialTokens = Mapping[str, int]  # the ids of a model's special tokens, by their texts
_JSON_OPTIONS = {"x-guidance": {"whitespace_pattern": "[ ]?"}}
_ANY_OBJECT = {"type": "object", **_JSON_OPTIONS}
_NAMED = re.compile(r"<[^<>\[\]\s]+>")  # what a grammar takes for the name of a special token
_ANY = "/(?s:.*)/"


def needs_grammar(division: Division, *, has_form: bool) -> bool:
    """Whether a request's tools, or what the prompt has begun, bind what the output may be; `has_form`: something else
    binds it, too.
    """
    tools, form = division.tools, division.form
    if tools is None:
        return has_form and division.reasoning is not None
    can_bind = form is not None and form.can_force and (has_form or bool(tools.strict and form.binds_strict))
    return bool(tools.forced) or can_bind


def calls_grammar(division: Division, special: SpecialTokens, constraint: Constraint | None) -> str:
    """The grammar of an output that may have calls. Empty: nothing binds it but the constraint that it has already.

    If the constraint says JSON, the output is a call, or such JSON. Where a call must come, no JSON does. Raises
    InvalidArgument if a call must come and cannot. Such JSON stands after reasoning that the prompt has begun.
    """
    tools, form, answer = division.tools, division.form, None if constraint is None else _answer_schema(constraint)
    if tools is None and answer is not None and division.begins_inside:
        return _reasoned_grammar(answer, division.reasoning, special)
    if tools is None or (constraint is not None and answer is None and not tools.forced):
        return ""
    if constraint is not None and answer is None:
        what = f"a call must come, and the output must be of a {constraint.shape}: leave out one of them"
        raise InvalidArgument("tool_choice", what)
    if form is None:
        raise InvalidArgument("tool_choice", "nobody knows how this model writes calls: use auto, or --tool-parser")
    thinks, inside = division.reasoning, division.begins_inside
    if answer is not None and not tools.forced and form.open_call.startswith("{"):
        return ""  # a call looks like the answer: the library that makes masks cannot have both
    if answer is None and not tools.forced:
        return strict_grammar(tools, form, special, thinks, begins_inside=inside)
    try:
        return forced_grammar(
            tools, form, special, thinks, begins_inside=inside, answer=None if tools.forced else answer
        )
    except InvalidArgument:
        if tools.forced:
            raise
        return ""  # a tool's schema cannot be kept in this form of calls, and nobody has asked for that


def _reasoned_grammar(answer: Mapping[str, Any], reasoning: ReasoningFormat | None, special: SpecialTokens) -> str:
    """The grammar of the rest of the reasoning, and of JSON after it."""
    before, rules = _reasoning_rules(reasoning, special, begins_inside=True)
    return "\n".join([f"start: {before}answer", *rules, f"answer: %json {json.dumps({**answer, **_JSON_OPTIONS})}"])


def _answer_schema(constraint: Constraint) -> dict[str, Any] | None:
    """What JSON the output must be; None if it need not be any."""
    if constraint.shape is Shape.JSON_OBJECT:
        return {"type": "object"}
    if constraint.shape is not Shape.JSON_SCHEMA:
        return None
    schema = parsed_json("constraint.json_schema", constraint.text)
    return schema if isinstance(schema, dict) else {} if schema is True else None


def forced_grammar(
    tools: AskedTools,
    form: ToolFormat,
    special: SpecialTokens,
    reasoning: ReasoningFormat | None = None,
    *,
    begins_inside: bool = False,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """The grammar of one call of a forced tool, or of several. Raises InvalidArgument if the form has none.

    With an `answer`, JSON of this schema may come in their place, and any tool may be called.
    """
    if not form.can_force:
        raise InvalidArgument("tool_choice", f"this model's form of calls ({form.name}) cannot be forced; use auto")
    more = f" ({json.dumps(form.between)} call)*" if tools.is_parallel and form.between else ""
    before, rules = _reasoning_rules(reasoning, special, begins_inside=begins_inside)
    calls = {
        name: (form.open_call.replace("NAME", name), tools.schemas[name]) for name in tools.forced or tools.schemas
    }
    output = _all_calls(f"call{more}", form, special)
    if answer is not None:
        output = f"({output} | answer)"
        rules = [*rules, f"answer: %json {json.dumps({**answer, **_JSON_OPTIONS})}"]
    return "\n".join([f"start: {before}{output}", *rules, *_call_rules(calls, form, special)])


def strict_grammar(
    tools: AskedTools,
    form: ToolFormat,
    special: SpecialTokens,
    reasoning: ReasoningFormat | None = None,
    *,
    begins_inside: bool = False,
) -> str:
    """The grammar of any text in which calls of strict tools keep their schemas, and other calls are of known tools."""
    mark = "" if form.at_start else form.begins[0]
    calls: dict[str, tuple[str, Mapping[str, object] | None]] = {}
    for name, schema in tools.schemas.items():
        begin = form.open_call.replace("NAME", name).removeprefix(mark)
        calls[name] = (begin, schema if name in tools.strict else None)
    before, rules = _reasoning_rules(reasoning, special, begins_inside=True) if begins_inside else ("", [])
    if form.at_start:
        more = f" ({json.dumps(form.between)} call)*" if tools.is_parallel and form.open_all else ""
        rules += [f"start: {before}({_all_calls(f'call{more}', form, special)} | other)", _other_rule(form)]
    else:
        many = "(text call)* rest" if tools.is_parallel else "(rest | text call)"
        rules += [f"start: {before}{many}", f"rest: {_ANY}", _until("text", mark, special)]
    return "\n".join(
        [*sorted(rules, key=lambda rule: not rule.startswith("start")), *_call_rules(calls, form, special)]
    )


def _all_calls(calls: str, form: ToolFormat, special: SpecialTokens) -> str:
    """The calls with what stands around all of them."""
    return " ".join(filter(None, (_terminals(form.open_all, special), calls, _terminals(form.close_all, special))))


def _call_rules(
    calls: Mapping[str, tuple[str, Mapping[str, object] | None]], form: ToolFormat, special: SpecialTokens
) -> list[str]:
    """The rules of calls, by the names of tools: what stands before the arguments, and the schema that they keep."""
    rules, end = ["call: " + " | ".join(f"tool_{i}" for i in range(len(calls)))], _terminals(form.close_call, special)
    for i, (name, (begin, schema)) in enumerate(calls.items()):
        rules.append(f"tool_{i}: {_terminals(begin, special)} args_{i} {end}")
        if form.in_python:
            rules += python_rules(f"args_{i}", name, schema)
        elif form.open_argument:
            rules += tagged_rules(f"args_{i}", name, schema or {}, form)
        else:
            whole = {"type": "object", **closed(schema or {}), **_JSON_OPTIONS}
            rules.append(f"args_{i}: %json {json.dumps(whole)}")
    return rules


def _reasoning_rules(
    reasoning: ReasoningFormat | None, special: SpecialTokens, *, begins_inside: bool
) -> tuple[str, list[str]]:
    """What stands before a call, and the rules of it."""
    if reasoning is None:
        return "", []
    after = f"{_terminals(reasoning.after, special)} " if reasoning.after else ""
    rules = [_until("thought", reasoning.end, special), r"gap: /\s{0,4}/"]
    if begins_inside:
        return f"thought gap {after}", rules
    return f"({_terminals(reasoning.begin, special)} thought gap {after})? ", rules


def _until(rule: str, mark: str, special: SpecialTokens) -> str:
    """A rule of any text with a mark at its end."""
    if mark in special:
        return f"{rule}: {_ANY} {_terminals(mark, special)}"
    return f"{rule}[suffix={json.dumps(mark)}]: {_ANY}"


def _other_rule(form: ToolFormat) -> str:
    """A rule of a text that does not begin as a call does."""
    begins = "|".join(re.escape(mark).replace("/", r"\/").replace(r"\ ", " ") for mark in form.kept)
    return rf"other: OTHER" "\n" rf"OTHER: {_ANY} & ~/\s*({begins})(?s:.*)/"


def _terminals(text: str, special: SpecialTokens) -> str:
    """The text as terminals of a grammar: special tokens by their names or ids, all else as strings."""
    for token in special:
        if token and token in text:
            before, after = (_terminals(part, special) for part in text.split(token, 1))
            named = token if _NAMED.fullmatch(token) else f"<[{special[token]}]>"
            return " ".join(filter(None, (before, named, after)))
    return json.dumps(text) if text else ""
