"""The form that outputs must have: OpenAI's `response_format`, and `structured_outputs` as vLLM has it."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from octavo.request.errors import FieldViolation, InvalidArgument
from octavo.text.closed_schemas import closed_if_object
from octavo.v1 import types_pb2
from router.http.bodies.field_reader import FieldReader, checked_text, json_text

FORMATS = ("text", "json_object", "json_schema", "structural_tag")
# Fields of structured_outputs: how their values become those of octavo.v1.Constraint.
FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_CONSTRAINT = re.compile(r"^(sampling\.)?constraint\b.*")


def read_constraint(fields: FieldReader, sampling: types_pb2.SamplingParams) -> str:
    """Takes both fields into the constraint; the path of the one that is there, or empty. What is wrong with them is in
    `fields.checks`.
    """
    path = ""
    outputs, form = fields.take_object("structured_outputs"), fields.take_object("response_format")
    if outputs is not None:
        path = fields.checks.run(_read_outputs, outputs, sampling.constraint) or ""
    if form is not None:
        before = sampling.HasField("constraint")
        path = fields.checks.run(_read_format, form, sampling) or path
        if before and sampling.HasField("constraint") and outputs is not None:
            fields.refuse("response_format", "not allowed beside structured_outputs; leave one of them out")
    return path


def _read_outputs(outputs: FieldReader, constraint: types_pb2.Constraint) -> str:
    """The path of the form."""
    given = {name: value for name in FORMS if (value := outputs.take_any(name)) not in (None, False)}
    outputs.take_ignored(["disable_any_whitespace", "disable_fallback"])
    outputs.refuse_rest()
    if len(given) != 1:
        what = f"needs one of {', '.join(FORMS)}; has {len(given)}"
        outputs.checks.found.append(FieldViolation("structured_outputs", what))
        return ""
    ((name, value),) = given.items()
    path = f"structured_outputs.{name}"
    match name:
        case "json":
            constraint.json_schema = schema_text(path, value)
        case "structural_tag":
            constraint.structural_tag = _json_text(path, value)
        case "regex":
            constraint.regex = checked_text(path, value)
        case "grammar":
            constraint.lark = checked_text(path, value)
        case "json_object":
            if value is not True:
                raise InvalidArgument(path, "must be true or false")
            constraint.json_object = True
        case _:
            if not isinstance(value, list):
                raise InvalidArgument(path, "must be a list of texts")
            constraint.choice.texts.extend(checked_text(f"{path}[{i}]", text) for i, text in enumerate(value))
    return path


def _read_format(form: FieldReader, sampling: types_pb2.SamplingParams) -> str:
    """The path of the form."""
    path = "response_format"
    kind = form.take_any("type")
    match kind:
        case "text":
            pass
        case "json_object":
            sampling.constraint.json_object = True
        case "structural_tag":
            rest = {name: form.take_any(name) for name in ("structures", "triggers")}
            sampling.constraint.structural_tag = json.dumps(rest)
        case "json_schema":
            path = "response_format.json_schema.schema"
            wanted = form.take_object("json_schema")
            schema = wanted.take_any("schema") if wanted is not None else None
            if wanted is None or not isinstance(schema, (dict, bool)):
                raise InvalidArgument(path, "must be an object")
            wanted.take_ignored(["name", "description", "strict"])
            wanted.refuse_rest()
            sampling.constraint.json_schema = schema_text(path, schema)
        case _:
            raise InvalidArgument("response_format.type", f"must be one of {', '.join(FORMATS)}")
    form.refuse_rest()
    return path


@contextmanager
def form_named(path: str) -> Iterator[None]:
    """What is refused inside has the field of the body, which is `path`, in the place of the constraint made of it."""
    try:
        yield
    except InvalidArgument as error:
        if not path or not error.violations:
            raise
        found = (FieldViolation(_CONSTRAINT.sub(lambda _: path, name), what) for name, what in error.violations)
        first, *others = found
        raise InvalidArgument(*first, *others) from None


def schema_text(path: str, value: Any) -> str:
    """A schema that came as an object, true or text; objects have the properties that it names."""
    return _json_text(path, closed_if_object(value))


def _json_text(path: str, value: Any) -> str:
    """A schema that came as an object or as text."""
    if isinstance(value, str):
        return checked_text(path, value)
    if not isinstance(value, (dict, bool)):
        raise InvalidArgument(path, "must be an object, or its text")
    return json_text(value, path)
