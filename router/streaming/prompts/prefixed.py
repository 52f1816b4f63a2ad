"""Requests whose prompts begin with a named prefix."""

from octavo.request.errors import InvalidArgument
from octavo.request.named_prefix import NamedPrefix
from octavo.v1 import inference_pb2


def with_prefix(request: inference_pb2.GenerateRequest, prefix: NamedPrefix) -> inference_pb2.GenerateRequest:
    """A copy of the request that can be tokenized: a chat with the system message.

    Raises InvalidArgument.
    """
    source = request.WhichOneof("input")
    if request.HasField("truncate_prompt_tokens"):
        raise InvalidArgument("prefix", "is not allowed beside truncate_prompt_tokens, which drops the beginning")
    if prefix.is_system != (source == "chat"):
        what = (
            "is the system message of chats: send chat" if prefix.is_system else "begins texts: send text or token_ids"
        )
        raise InvalidArgument("prefix", f"{prefix.name} {what}")
    whole = inference_pb2.GenerateRequest()
    whole.CopyFrom(request)
    if not prefix.is_system:
        return whole
    if request.chat.messages and request.chat.messages[0].role == "system":
        raise InvalidArgument("prefix", "is the system message: leave out the one in chat.messages[0]")
    del whole.chat.messages[:]
    whole.chat.messages.add(role="system", content=prefix.text)
    whole.chat.messages.extend(request.chat.messages)
    return whole
