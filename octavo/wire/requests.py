"""Converts what a router reads in the requests of clients, and what it tells of itself and of requests."""

import hashlib
from dataclasses import dataclass

from octavo.request import limits
from octavo.request.chat_tools import MessageDetails, Tool, ToolCall
from octavo.request.record import SequenceState
from octavo.request.sampling import PARAMETERS, SamplingParams
from octavo.v1 import inference_pb2
from octavo.wire.public import sampling_bytes

# Grows by one with each change of protos/octavo/v1 that a client could notice, such as a new sampling parameter.
SCHEMA_REVISION = max(17, *(row.since for row in PARAMETERS.values()))


def request_hash(request: inference_pb2.GenerateRequest, params: SamplingParams) -> bytes:
    """A hash of the request, equal on every router, that tells a retry from another body under the same request id.

    The request must be valid, and `params` what it says of sampling, without what the model recommends.
    """
    rest = inference_pb2.GenerateRequest()
    rest.CopyFrom(request)
    rest.ClearField("sampling")
    sampling = sampling_bytes(params)
    body = len(sampling).to_bytes(4, "little") + sampling + rest.SerializeToString(deterministic=True)
    return hashlib.blake2b(body, digest_size=16).digest()


def state_to_wire(state: SequenceState) -> str:
    """The name of the value, which messages take, too."""
    return f"REQUEST_STATE_{state.name}"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt of chat messages, as a client sent it."""

    messages: list[tuple[str, str | bytes]]  # role and content, for octavo.request.validation.validate_chat
    begin_answer: bool  # whether the prompt ends where the assistant begins
    tools: list[Tool]
    details: list[MessageDetails]  # of each message; empty if no message has any
    continues: bool = False  # whether the prompt ends in the middle of the last message
    variables: str = ""  # of the template: a JSON object, or nothing


def chat_from_wire(message: inference_pb2.Chat) -> ChatPrompt:
    continues, given = message.continue_final_message, message.HasField("add_generation_prompt")
    begin_answer = message.add_generation_prompt if given else not continues
    turns = [(turn.role, turn.raw_content or turn.content or _text_of(turn)) for turn in message.messages]
    tools = [Tool(tool.name, tool.description, tool.parameters_json) for tool in message.tools]
    details = [
        MessageDetails(
            turn.name,
            turn.tool_call_id,
            [ToolCall(call.id, call.name, call.arguments_json) for call in turn.tool_calls],
            turn.reasoning_content,
            turn.extra_json,
        )
        for turn in message.messages
    ]
    has_details = any(each != MessageDetails() for each in details)
    variables = message.template_kwargs_json
    return ChatPrompt(turns, begin_answer, tools, details if has_details else [], continues, variables)


def _text_of(turn: inference_pb2.ChatMessage) -> str:
    """The texts of its parts, joined by newlines."""
    return "\n".join(part.text for part in turn.parts if part.HasField("text"))


def limits_to_wire() -> inference_pb2.Limits:
    names = [field.name for field in inference_pb2.Limits.DESCRIPTOR.fields]
    return inference_pb2.Limits(**{name: getattr(limits, name.upper()) for name in names})
