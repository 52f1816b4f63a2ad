"""The prompt in a client's request: a text, a chat or token ids, checked as far as no tokenizer is needed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from octavo.request import limits, validation
from octavo.request.chat_tools import details_for_template, tools_for_template, variables_for_template
from octavo.request.errors import InvalidArgument, ViolationCollector
from octavo.text.tokenizers.tokenizer import AnyTokenizer
from octavo.v1 import inference_pb2
from octavo.wire.requests import ChatPrompt, chat_from_wire
from router.fleet.model_registry import ServedModel
from router.streaming.prompts.picture_prompts import with_contents
from router.streaming.prompts.prompt_ends import refuse_unspoken, truncated


@dataclass(frozen=True, slots=True)
class CheckedChat:
    """Chat messages as roles and texts, and whether the prompt ends where the assistant begins."""

    messages: list[tuple[str, str]]
    begin_answer: bool
    tools: list[dict[str, Any]]  # as templates expect them
    details: list[dict[str, Any]]  # the further fields of each message; empty if no message has any
    size: int  # characters, about
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of the tokenizer

    def tokenized_by(self, tokenizer: AnyTokenizer) -> list[int]:
        """The prompt. Raises InvalidArgument."""
        try:
            return tokenizer.apply_chat(self.messages, self.begin_answer, self.tools, self.details, **self.options)
        except InvalidArgument as error:
            if error.field == "chat_template_kwargs":  # as offline callers name it
                raise InvalidArgument("chat.template_kwargs_json", error.violations[0].description) from None
            raise


def checked_input(
    request: "inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest", model: ServedModel
) -> str | CheckedChat | Sequence[int]:
    """The text, the chat or the token ids in the request. Raises InvalidArgument with all that is wrong."""
    match request.WhichOneof("input"):
        case "token_ids":
            return cast("inference_pb2.GenerateRequest", request).token_ids.ids
        case "text" | "raw_text" as field:
            data = request.text if field == "text" else request.raw_text
            return validation.validate_text(data, field, context_tokens=model.context_tokens)
        case "chat":
            checked = checked_chat(chat_from_wire(request.chat), model)
            told = with_contents(checked.details, request.chat, len(checked.messages))
            return replace(checked, details=told)
    ids = ", token_ids" if isinstance(request, inference_pb2.GenerateRequest) else ""
    raise InvalidArgument("input", f"send text, raw_text{ids} or chat, or speech to a model that writes it down")


def checked_chat(chat: ChatPrompt, model: ServedModel) -> CheckedChat:
    """The chat as templates expect it. Raises InvalidArgument with all that is wrong."""
    checks, max_bytes = ViolationCollector(), limits.MAX_TEXT_BYTES_PER_CONTEXT_TOKEN * model.context_tokens
    messages = checks.run(validation.validate_chat, chat.messages, context_tokens=model.context_tokens) or []
    tools = checks.run(tools_for_template, chat.tools, max_bytes=max_bytes) or []
    details = checks.run(details_for_template, chat.details, max_bytes=max_bytes) or []
    variables = checks.run(variables_for_template, chat.variables) or {}
    checks.raise_found()
    texts = sum(len(content) for _, content in messages) + sum(len(tool.parameters) for tool in chat.tools)
    size = texts + sum(each.num_bytes for each in chat.details) + len(chat.variables)
    if chat.continues and chat.begin_answer:
        what = "is not allowed beside add_generation_prompt, which begins another message: leave out one of them"
        raise InvalidArgument("chat.continue_final_message", what)
    options: dict[str, Any] = {"continue_final_message": True} if chat.continues else {}
    if variables:
        options["variables"] = variables
    return CheckedChat(messages, chat.begin_answer, tools, details, size, options)


def check_input(request: inference_pb2.GenerateRequest, model: ServedModel) -> None:
    """Raises InvalidArgument with all that is wrong with the prompt and can be found without tokenizing."""
    if refuse_unspoken(request, model):
        return
    checked = checked_input(request, model)
    if request.WhichOneof("input") == "token_ids":
        token_ids = truncated(cast("Sequence[int]", checked), request, model)
        validation.validate_prompt(token_ids, vocab_size=model.vocab_size, context_tokens=model.context_tokens)
