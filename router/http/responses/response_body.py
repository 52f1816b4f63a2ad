"""POST /v1/responses: what a body asks for."""

from dataclasses import dataclass, field
from typing import Any

from octavo.request.errors import InvalidArgument
from octavo.request.ids import new_request_id
from octavo.v1 import inference_pb2
from router.http.bodies.common_fields import AskedAnswer, read_max_tokens
from router.http.bodies.constraint_fields import schema_text
from router.http.bodies.field_reader import FieldReader, checked_text, json_text
from router.http.bodies.reasoning_fields import VARIABLES, read_reasoning
from router.http.chats.chat_writer import ChatWriter, checked_list, read_one_output, strict_names
from router.http.responses.input_items import Item, read_items
from router.tools.asked_tools import read_choice

ID_PREFIX = "resp_"
DEFAULT_MAX_TOKENS = 4096  # as for chats: OpenAI has no default but the model's largest output
MAX_LISTED = 1024  # tools; the validator knows the limit
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512  # of metadata, as OpenAI has them
IGNORED = ("include", "max_tool_calls", "stream_options", "prompt_cache_options")
# What changes an answer only if it has other values than these.
HARMLESS: dict[str, tuple[list[object], str]] = {
    "truncation": (["disabled"], "no text is left out in silence; send less, or leave truncation out"),
    "top_logprobs": ([0], "is not supported: log probabilities are in no record; use /v1/chat/completions"),
    "conversation": ([], "is not supported; use previous_response_id"),
    "prompt": ([], "templates are not stored here; send the text as input"),
}


@dataclass(slots=True)
class AskedResponse:
    """One request of a client."""

    answer: AskedAnswer
    items: list[Item] = field(default_factory=list)  # of this request alone
    instructions: str | None = None
    previous_id: str | None = None
    stored: bool = True
    background: bool = False
    shown: dict[str, Any] = field(default_factory=dict)  # what the response repeats of the request


def read_response(body: dict[str, Any], name: str = "") -> AskedResponse:
    """What the body asks for, and has no conversation yet: `ChatWriter` adds what came before.

    `name` is what the client calls the request. Raises InvalidArgument with all that is wrong and can be seen without
    the model and what is stored.
    """
    fields, request = FieldReader(body), inference_pb2.GenerateRequest()
    checks = fields.checks
    shown: dict[str, Any] = {"metadata": checks.run(_metadata, fields.take_any("metadata")) or {}}
    stored, background = fields.take_flag("store", default=True), fields.take_flag("background")
    for key, (harmless, what) in HARMLESS.items():
        fields.take_harmless(key, harmless, what)
    fields.take_ignored(IGNORED)
    asked = AskedResponse(read_one_output(fields, request), stored=stored, background=background, shown=shown)
    _name(asked, name)
    if background:
        request.on_disconnect = inference_pb2.ON_DISCONNECT_KEEP
        if not stored:
            fields.refuse("background", "is allowed only beside store: true; nobody could fetch the answer")
    asked.items = checks.run(read_items, fields.take_any("input"), request.request_id) or []
    asked.instructions = fields.take_text("instructions") if "instructions" in fields else None
    asked.previous_id = fields.take_text("previous_response_id") or None
    checks.run(_read_tools, fields, asked)
    limit = read_max_tokens(fields, request.sampling, "max_output_tokens")
    if limit is None:
        request.sampling.max_tokens = DEFAULT_MAX_TOKENS
    shown["text"] = {"format": _read_format(fields, asked.answer)}
    shown["reasoning"] = {"effort": _read_effort(fields, request), "summary": None}
    fields.refuse_rest()
    checks.raise_found()
    sampling = request.sampling
    shown |= {
        "max_output_tokens": limit,
        "instructions": asked.instructions,
        "previous_response_id": asked.previous_id,
        "temperature": sampling.temperature if sampling.HasField("temperature") else None,
        "top_p": sampling.top_p if sampling.HasField("top_p") else None,
        "store": stored,
        "background": background,
        "truncation": "disabled",
    }
    return asked


def _name(asked: AskedResponse, name: str) -> None:
    """Gives the request its id, which begins as all ids of responses do."""
    answer = asked.answer
    request, chosen = answer.request, answer.chosen_id or bool(name)
    wanted = request.request_id if answer.chosen_id else name or new_request_id()[2:]
    request.request_id = wanted if wanted.startswith(ID_PREFIX) else ID_PREFIX + wanted
    answer.chosen_id = chosen


def _metadata(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_PAIRS:
        raise InvalidArgument("metadata", f"must be an object of at most {MAX_PAIRS} pairs")
    for key, text in value.items():
        checked_text("metadata", key)
        if len(key) > MAX_KEY or len(checked_text(f"metadata.{key[:MAX_KEY]}", text)) > MAX_VALUE:
            raise InvalidArgument("metadata", f"keys have at most {MAX_KEY} characters, values {MAX_VALUE}")
    return value


def _read_tools(fields: FieldReader, asked: AskedResponse) -> None:
    listed, choice = fields.take_any("tools"), fields.take_any("tool_choice")
    is_parallel = fields.take_flag("parallel_tool_calls", default=True)
    listed = checked_list("tools", listed, MAX_LISTED)
    writer = ChatWriter(asked.answer.request.chat)
    shown = [_add_tool(writer, tool, f"tools[{i}]") for i, tool in enumerate(listed)]
    asked.answer.tools = read_choice(_chosen(choice), writer.schemas(), is_parallel, strict_names(listed))
    if asked.answer.tools is None:
        writer.drop_tools()
    json_text(choice, "tool_choice")
    asked.shown |= {"tools": shown, "tool_choice": choice or "auto", "parallel_tool_calls": is_parallel}


def _chosen(choice: Any) -> Any:
    """`tool_choice` in the words of chats."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        return {"type": kind, kind: {name: choice.get(name) for name in ("mode", "tools")}}
    if kind != "function":
        raise InvalidArgument("tool_choice", f"tools of type {str(kind)[:40]!r} are not supported; name a function")
    return choice


def _add_tool(writer: ChatWriter, tool: Any, path: str) -> dict[str, Any]:
    """Adds a tool; what the response shows of it."""
    if not isinstance(tool, dict):
        raise InvalidArgument(path, "must be an object")
    fields = FieldReader(tool, path=f"{path}.")
    kind = fields.take_text("type")
    if kind != "function":
        raise InvalidArgument(f"{path}.type", f"tools of type {kind[:40]!r} are not supported; send a function")
    name, description = fields.take_text("name"), fields.take_text("description")
    parameters, strict = fields.take_any("parameters"), fields.take_flag("strict")
    fields.refuse_rest()
    fields.checks.raise_found()
    writer.add_tool(name, description, parameters, f"{path}.parameters")
    shown = {"name": name, "description": description or None, "parameters": parameters, "strict": strict}
    return {"type": kind, **shown}


def _read_format(fields: FieldReader, answer: AskedAnswer) -> dict[str, Any]:
    """Takes the form of the output into the constraint; what the response shows of it."""
    text = fields.take_object("text")
    form = text.take_object("format") if text is not None else None
    if text is not None:
        text.take_harmless("verbosity", ["medium"], "is not supported; leave it out")
        text.refuse_rest()
    kind = form.take_text("type") if form is not None else ""
    if form is None or kind == "text":
        return {"type": "text"}
    shown: dict[str, Any] = {"type": kind}
    constraint, had_one = answer.request.sampling.constraint, answer.request.sampling.HasField("constraint")
    answer.form_path = answer.form_path or "text.format"
    if had_one:
        form.refuse("type", "is not allowed beside structured_outputs or response_format: leave out one of them")
    if kind == "json_object":
        constraint.json_object = True
    elif kind == "json_schema":
        schema, path = form.take_any("schema"), "text.format.schema"
        shown |= {"name": form.take_text("name"), "schema": schema, "strict": form.take_flag("strict")}
        form.take_ignored(["description"])
        if isinstance(schema, dict):
            constraint.json_schema, answer.form_path = form.checks.run(schema_text, path, schema) or "", path
        else:
            form.refuse("schema", "must be an object")
    else:
        form.refuse("type", "must be text, json_object or json_schema")
    form.refuse_rest()
    return shown


def _read_effort(fields: FieldReader, request: inference_pb2.GenerateRequest) -> str | None:
    """Takes how much the model is to think, as chats have it."""
    reasoning = fields.take_object("reasoning")
    effort = None if reasoning is None else reasoning.take_any("effort")
    if reasoning is not None:
        reasoning.take_ignored(("summary", "generate_summary", "mode", "context"))
        reasoning.refuse_rest()
    given = {name: value for name in (VARIABLES,) if (value := fields.take_any(name)) is not None}
    read_reasoning(FieldReader({"reasoning_effort": effort, **given}, fields.checks), request.chat)
    return None if effort is None else str(effort)
