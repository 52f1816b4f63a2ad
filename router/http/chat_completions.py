"""POST /v1/chat/completions: messages for the model's chat template, and how the assistant answers."""

from typing import Any

from octavo.request.errors import InvalidArgument, ViolationCollector
from octavo.request.ids import new_request_id
from octavo.v1 import inference_pb2
from router.http.asked_answer import AskedAnswer
from router.http.chat_fields import add_messages, add_tools
from router.http.common_fields import SCORES, read_common, read_max_tokens
from router.http.field_reader import FieldReader

ID_PREFIX = "chatcmpl-"
# OpenAI has no default but the model's largest output. The queue counts what a request may come to: a context of 128 Ki
# tokens as the default would fill it with 60 requests.
DEFAULT_MAX_TOKENS = 4096
# What changes an answer only if it has other values than these.
HARMLESS: dict[str, tuple[list[object], str]] = {
    "response_format": ([{"type": "text"}], "only the type text is supported: the output cannot be constrained"),
    "modalities": ([["text"]], "only text is supported"),
    "reasoning_effort": (["none"], "is not supported; leave it out"),
    "verbosity": (["medium"], "is not supported; leave it out"),
    "function_call": (["none"], "is not supported; use tools"),
    "parallel_tool_calls": ([True], "must be true: what the model calls cannot be constrained"),
    "continue_final_message": ([False], "is not supported; leave it out"),
    "echo": ([False], "is not supported in a chat"),
}


def read_chat(body: dict[str, Any]) -> AskedAnswer:
    """What the body asks for. Raises InvalidArgument with all that is wrong and can be seen without the model."""
    fields, request = FieldReader(body), inference_pb2.GenerateRequest()
    checks, sampling = fields.checks, request.sampling
    asked = read_common(fields, request)
    if not asked.chosen_id:
        request.request_id = ID_PREFIX + new_request_id()[2:]
    checks.run(_add_chat, fields, request.chat)
    if read_max_tokens(fields, sampling, "max_completion_tokens", "max_tokens") is None:
        sampling.max_tokens = DEFAULT_MAX_TOKENS
    asked.scores = fields.take_flag("logprobs")
    top = fields.take_number("top_logprobs", SCORES)
    if top is not None and not asked.scores:
        fields.refuse("top_logprobs", "is allowed only beside logprobs: true")
    if asked.scores:
        sampling.logprobs = top or 0
    for name, (harmless, what) in HARMLESS.items():
        fields.take_harmless(name, harmless, what)
    fields.refuse_rest()
    checks.raise_found()
    return asked


def _add_chat(fields: FieldReader, chat: inference_pb2.Chat) -> None:
    """Adds the messages and the tools. Raises InvalidArgument with all that is wrong with them."""
    checks = ViolationCollector()
    checks.run(add_messages, chat, fields.take_any("messages"))
    chat.add_generation_prompt = fields.take_flag("add_generation_prompt", default=True)
    tools, choice = fields.take_any("tools"), fields.take_any("tool_choice")
    if choice not in (None, "auto", "none"):
        checks.run(_refuse_choice)
    elif choice != "none":
        checks.run(add_tools, chat, tools)
    checks.raise_found()


def _refuse_choice() -> None:
    raise InvalidArgument("tool_choice", "must be auto or none: what the model calls cannot be constrained")
