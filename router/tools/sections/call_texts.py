"""Reads the calls of tools out of the text between their marks, as each family of models writes them.

Each function takes that text and the schemas of the tools by name, and returns the calls. It raises ValueError for what
is none: the text is then content.
"""

import ast
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from router.tools.parts import FunctionCall

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments of each tool
Reader = Callable[[str, Schemas], list[FunctionCall]]

_BETWEEN = re.compile(r"[\s;,]*")
_FUNCTION = re.compile(r"<function=([^<>\n]{1,256})>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,256})>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_BRACED = re.compile(r"\s*call:([^\s{}]{1,256})\{(.*)\}\s*", re.DOTALL)
_PARTS = re.compile(  # a text between marks, a sign, or a key, number or word
    r"<\|\"\|>(?P<text>.*?)<\|\"\|>|<escape>(?P<older>.*?)<escape>|(?P<sign>[{}\[\]:,])|(?P<bare>[^{}\[\]:,<]+)",
    re.DOTALL,
)
_VALUE = re.compile(r"\s*<arg_value>")
_NO_TEXT = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None}  # of JSON, which models write among Python's


def _no_json(word: str) -> float:
    raise ValueError(f"{word} is no JSON")


def _finite(value: float) -> float:
    """The largest float stands for what is larger."""
    return math.copysign(sys.float_info.max, value) if math.isinf(value) else value


_DECODER = json.JSONDecoder(parse_constant=_no_json, parse_float=lambda digits: _finite(float(digits)))


def json_calls(text: str, schemas: Schemas) -> list[FunctionCall]:
    """{"name": …, "arguments": {…}}, or a list of these, or several one after another."""
    return [_call_of(value) for value in _flat(_json_values(text))]


def python_calls(text: str, schemas: Schemas) -> list[FunctionCall]:
    """[name(a=1, b="x"), other()], as Python writes it; also without brackets."""
    text = text.strip().removeprefix("```tool_code").removesuffix("```").strip()
    if len(text) > 1 << 16:
        raise ValueError("too long for a call in Python's words")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None
    calls = tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]
    return [_python_call(each) for each in calls]


def xml_calls(text: str, schemas: Schemas) -> list[FunctionCall]:
    """<function=name><parameter=key>value</parameter></function>. A value is text unless the schema says otherwise."""
    found = []
    for name, body in _FUNCTION.findall(text):
        values = {key.strip(): value for key, value in _PARAMETER.findall(body)}
        found.append(_typed_call(name, values, schemas))
    return _some(found)


def keyed_calls(text: str, schemas: Schemas) -> list[FunctionCall]:
    """GLM's: the name, then pairs of <arg_key> and <arg_value>."""
    name, *_ = text.strip().split("\n", 1)
    name = name.split("<arg_key>", 1)[0]
    values = {key.strip(): value for key, value in _pairs(text)}
    return [_typed_call(name, values, schemas)]


def braced_calls(text: str, schemas: Schemas) -> list[FunctionCall]:
    """Gemma 4's and FunctionGemma's: call:name{key:<|"|>text<|"|>,other:[1,true]}, JSON with marks for quotes."""
    found = _BRACED.fullmatch(text)
    if found is None:
        raise ValueError("no call")
    said, place, made = "{" + found[2] + "}", 0, list[str]()
    while place < len(said):
        part = _PARTS.match(said, place)
        if part is None:
            raise ValueError("a mark that does not end")
        place, kind = part.end(), part.lastgroup
        if kind == "sign":
            made.append(part.group())
        elif kind == "bare":
            made.append(_bare(part.group().strip(), is_key=said[place : place + 1] == ":"))
        else:
            made.append(_dumped(part[kind or "text"]))
    return [FunctionCall(_named(found[1]), _dumped(_DECODER.decode("".join(made))))]


def _bare(text: str, *, is_key: bool) -> str:
    """A key, or a value without marks: what JSON says without quotes, or a text."""
    if is_key or not _NO_TEXT.fullmatch(text):
        return _dumped(text) if text else ""
    return text


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """The keys and values between GLM's marks. It goes over the text once, also where marks are missing."""
    place = 0
    while (begin := text.find("<arg_key>", place)) >= 0 and (end := text.find("</arg_key>", begin)) >= 0:
        place = end + len("</arg_key>")
        found = _VALUE.match(text, place)
        if found is None:
            continue
        stop = text.find("</arg_value>", found.end())
        if stop < 0:
            return
        yield text[begin + len("<arg_key>") : end], text[found.end() : stop]
        place = stop + len("</arg_value>")


def _json_values(text: str) -> Iterator[Any]:
    place = _skip(text, 0)
    if place == len(text):
        raise ValueError("no call")
    while place < len(text):
        try:
            value, place = _DECODER.raw_decode(text, place)
        except RecursionError:
            raise ValueError("nested too deep") from None
        yield value
        place = _skip(text, place)


def _skip(text: str, place: int) -> int:
    found = _BETWEEN.match(text, place)
    return found.end() if found else place


def _flat(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from value
        else:
            yield value


def _call_of(value: Any) -> FunctionCall:
    if not isinstance(value, dict):
        raise ValueError("a call is an object")
    if isinstance(value.get("function"), dict):
        value = value["function"]
    arguments: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    text = arguments if isinstance(arguments, str) else _dumped(arguments)
    return FunctionCall(_named(value.get("name")), _arguments_of(text))


def _arguments_of(text: str) -> str:
    """JSON of an object, as it was written."""
    text = text.strip() or "{}"
    try:
        found = _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError("arguments are an object")
    return text if _is_utf8(text) else _dumped(found)


def _dumped(value: Any) -> str:
    """JSON that has a UTF-8 form: a lone surrogate stands escaped in it."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        return text if _is_utf8(text) else json.dumps(value)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _named(name: Any) -> str:
    if not isinstance(name, str) or not name.strip() or not _is_utf8(name):
        raise ValueError("a call has a name")
    return name.strip()


def _some(calls: list[FunctionCall]) -> list[FunctionCall]:
    if not calls:
        raise ValueError("no call")
    return calls


def _typed_call(name: str, values: Mapping[str, str], schemas: Schemas) -> FunctionCall:
    name = _named(name)
    schema = schemas.get(name)
    properties = schema.get("properties") if isinstance(schema, dict) else None
    properties = properties if isinstance(properties, dict) else {}
    typed = {key: _typed(value, properties.get(key, {})) for key, value in values.items()}
    return FunctionCall(name, _dumped(typed))


def _typed(value: str, schema: Any) -> Any:
    kinds = schema.get("type", "string") if isinstance(schema, dict) else "string"
    if not isinstance(kinds, (str, list)) or kinds == "string" or "string" in kinds:
        return value
    try:
        return _DECODER.decode(value)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(value.strip(), value)


def _python_call(node: ast.expr) -> FunctionCall:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, (ast.Name, ast.Attribute)):
        raise ValueError("a call has arguments with names")
    try:
        values = {str(each.arg): _literal(each.value) for each in node.keywords}
        return FunctionCall(_named(ast.unparse(node.func)), _dumped(values))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _literal(node: ast.expr) -> Any:
    """The value of a literal, in which words of JSON may stand."""
    match node:
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.List(elts=values) | ast.Tuple(elts=values):
            return [_literal(value) for value in values]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    value = ast.literal_eval(node)
    return _finite(value) if isinstance(value, float) else value


def _key(node: ast.expr | None) -> Any:
    """The key of an object; None: it is another object, whose keys come in."""
    if node is None:
        raise ValueError("an object has keys")
    return _literal(node)
