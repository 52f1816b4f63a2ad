"""What a body says of reasoning, and of the variables of the model's chat template."""

import json
from typing import Any

from octavo.request.chat_tools import variables_for_template
from octavo.request.errors import InvalidArgument
from octavo.v1 import inference_pb2
from router.http.bodies.field_reader import FieldReader

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
VARIABLES = "chat_template_kwargs"


def read_reasoning(fields: FieldReader, chat: inference_pb2.Chat) -> bool:
    """Takes the fields into the template's variables. Returns whether the answer shows the reasoning."""
    effort = fields.take_any("reasoning_effort")
    variables = {}
    if effort is not None:
        if effort not in EFFORTS:
            fields.refuse("reasoning_effort", f"must be one of {', '.join(EFFORTS)}")
        variables = _of_effort(effort)
    given = fields.take_any(VARIABLES)
    if given is not None:
        variables |= fields.checks.run(_checked_variables, given) or {}
    if variables:
        chat.template_kwargs_json = json.dumps(variables)
    return fields.take_flag("include_reasoning", default=True)


def _of_effort(effort: Any) -> dict[str, Any]:
    """The names under which templates know it."""
    thinks = effort != "none"
    return {"enable_thinking": thinks, "thinking": thinks} | ({"reasoning_effort": effort} if thinks else {})


def _checked_variables(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise InvalidArgument(VARIABLES, "must be an object")
    try:
        text = json.dumps(given)
    except RecursionError:
        raise InvalidArgument(VARIABLES, "is nested too deep") from None
    return variables_for_template(text, VARIABLES)
