"""/tokenize, /detokenize, /tokenizer_info and /version, in vLLM's shapes."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from octavo.request.errors import InvalidArgument
from octavo.v1 import inference_pb2
from router.http.answers import AnswerService, called
from router.http.bodies.chat_body import read_chat
from router.http.bodies.completion_body import MAX_PROMPT_IDS, read_completion
from router.http.bodies.field_reader import FieldReader, checked_ids
from router.http.bodies.json_body import parse_object
from router.http.bodies.unknown_fields import ClientBody
from router.http.prompts.prompt_scores import shown_token
from router.http.reply import Reply
from router.streaming.prompts.chat_threads import run_aside

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
Answer = Callable[[AnswerService, ClientBody], Awaitable[dict[str, Any]]]


@dataclass(eq=False)
class TextCall:
    """An endpoint that takes a body and answers at once."""

    service: AnswerService
    answer: Answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, called(scope))
        async with reply:
            data = await self.service.bodies.read(scope, receive)
            body = await run_aside(len(data), lambda: parse_object(data, self.service.unknown_fields))
            answer = await self.answer(self.service, body)
            reply.ignored = body.ignored
            await reply.send_object(answer)


async def tokenize(service: AnswerService, body: ClientBody) -> dict[str, Any]:
    """The tokens of a prompt or of messages, which are what the endpoint for them would run."""
    with_texts = body.pop("return_token_strs", None)
    if with_texts is not None and not isinstance(with_texts, bool):
        raise InvalidArgument("return_token_strs", "must be true or false")
    if (body.get("prompt") is None) == (body.get("messages") is None):
        raise InvalidArgument("prompt", "send a prompt, which is a string, or messages")
    if body.get("messages") is None and not isinstance(body["prompt"], str):
        raise InvalidArgument("prompt", "must be a string")
    request = (read_completion if body.get("messages") is None else read_chat)(body).request
    await service.preparer.look_up(request)
    model = service.preparer.find_model(request)
    tokens = await service.preparer.read_prompt(request, model)
    texts = [shown_token(token, model.tokenizer.token_bytes(token)) for token in tokens] if with_texts else None
    return {"count": len(tokens), "max_model_len": model.context_tokens, "tokens": tokens, "token_strs": texts}


async def detokenize(service: AnswerService, body: ClientBody) -> dict[str, Any]:
    """The text of tokens, with that of special tokens."""
    fields, request = FieldReader(body), inference_pb2.DetokenizeRequest(skip_special_tokens=False)
    if "model" in fields:
        request.model = fields.take_text("model")
    ids = fields.checks.run(checked_ids, "tokens", fields.take_any("tokens"), MAX_PROMPT_IDS)
    request.token_ids.extend(ids or [])
    fields.refuse_rest()
    fields.checks.raise_found()
    try:
        return {"prompt": await service.preparer.detokenize(request)}
    except InvalidArgument as error:
        raise InvalidArgument("tokens", error.violations[0].description) from None


@dataclass(eq=False)
class TokenizerInfoEndpoint:
    """The endpoint of what a client that renders chats by itself needs: `?model=NAME`, or the only one."""

    service: AnswerService

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = inference_pb2.TokenizeRequest()
        if name := QueryParams(scope["query_string"]).get("model"):
            request.model = name
        async with Reply(send, called(scope)) as reply:
            model = self.service.preparer.find_model(request)
            tokenizer = model.tokenizer
            tokens = {name: tokenizer.template_variables.get(name) for name in NAMED_TOKENS}
            said = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.context_tokens}
            await reply.send_object({**said, "chat_template": tokenizer.chat_template or None, **tokens})


class VersionEndpoint:
    """The endpoint of the version of this router."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Reply(send, called(scope)).send_object({"version": version("octavo")})
