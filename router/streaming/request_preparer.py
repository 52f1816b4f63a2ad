"""From what a client sends to a sequence that can be accepted: checked, tokenized, nothing left open."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from octavo import hashing, validation, wire
from octavo.errors import InvalidArgument, NoWorkers
from octavo.ids import Incarnation, new_request_id, sequence_id
from octavo.record import NewSequence
from octavo.sampling import SamplingParams
from octavo.v1 import inference_pb2
from router.fleet.model_registry import ModelRegistry, ServedModel

T = TypeVar("T")

TENANT = ""  # until requests are authenticated, all clients are one
LARGE = 8192  # characters or ids: what a tokenizer does with so many takes about as long as a step


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that has passed every check."""

    new: NewSequence
    model: ServedModel
    params: SamplingParams


class RequestPreparer:
    """Every method raises what is wrong with the request."""

    def __init__(self, models: ModelRegistry, router_id: Incarnation) -> None:
        self._models = models
        self._router_id = router_id

    async def prepare(self, request: inference_pb2.GenerateRequest, deadline_in_ms: int = 0) -> PreparedRequest:
        model = self.model(request)
        if not model.workers:
            raise NoWorkers(f"no worker serves {model.name} now: retry, or start one", retry_after_ms=500)
        request_id = (
            validation.validate_request_id(request.request_id) if request.HasField("request_id") else new_request_id()
        )
        params = wire.sampling_from_wire(request.sampling)
        context, vocab, eos = model.context_tokens, model.vocab_size, model.eos_token_ids
        validation.validate_sampling(params, vocab_size=vocab, context_tokens=context, eos_token_ids=eos)
        prompt, field = await self.prompt(request, model)
        validation.validate_prompt(prompt, params, vocab_size=vocab, context_tokens=context, field=field)
        params = validation.resolve(
            params, prompt_len=len(prompt), context_tokens=context, seed_source=lambda: secrets.randbits(63)
        )
        new = NewSequence(
            seq_id=sequence_id(TENANT, request_id),
            request_id=request_id,
            body_hash=wire.request_hash(request),
            tenant=TENANT,
            salt=TENANT,
            model=model.fingerprint,
            layout=model.layout,
            sampling=wire.sampling_bytes(params),
            prompt=prompt,
            prompt_chain=hashing.prompt_chain(prompt),
            num_branches=params.num_branches,
            max_tokens=params.max_tokens or 0,
            priority=priority_of(request.priority),
            deadline_in_ms=deadline_in_ms,
            keep_on_disconnect=request.on_disconnect == inference_pb2.ON_DISCONNECT_KEEP,
            router=self._router_id,
        )
        return PreparedRequest(new, model, params)

    def model(
        self,
        request: "inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest | inference_pb2.DetokenizeRequest",
    ) -> ServedModel:
        """The one it names, or the only one."""
        return self._models.find(request.model if request.HasField("model") else None)

    async def prompt(
        self, request: "inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest", model: ServedModel
    ) -> tuple[list[int], str]:
        """The prompt's tokens, and the field they came from."""
        match request.WhichOneof("input"):
            case "token_ids":
                return list(cast("inference_pb2.GenerateRequest", request).token_ids.ids), "token_ids"
            case "text":
                text = validation.validate_text(request.text, "text", context_tokens=model.context_tokens)
                return await aside(len(text), lambda: model.tokenizer.encode(text)), "text"
            case "chat":
                turns, begin_answer = wire.chat_from_wire(request.chat)
                messages = validation.validate_chat(turns, context_tokens=model.context_tokens)
                chat = [(message["role"], message["content"]) for message in messages]
                size = sum(len(content) for _, content in chat)
                return await aside(size, lambda: model.tokenizer.apply_chat(chat, begin_answer)), "chat"
        raise InvalidArgument("input", "send text, token_ids or chat")

    async def text(self, request: inference_pb2.DetokenizeRequest) -> str:
        """The text of given tokens."""
        model = self.model(request)
        validation.check_token_ids("token_ids", request.token_ids, model.vocab_size)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        ids = list(request.token_ids)
        return await aside(len(ids), lambda: model.tokenizer.decode(ids, skip))


async def aside(size: int, work: Callable[[], T]) -> T:
    """The result of `work`; if it is large, from a thread, so that no stream has to wait for it."""
    return await asyncio.to_thread(work) if size > LARGE else work()


def priority_of(value: "inference_pb2.Priority") -> int:
    if value not in inference_pb2.Priority.values():
        raise InvalidArgument("priority", f"no class {int(value)}; use one of SYSTEM, INTERACTIVE, DEFAULT, BULK")
    return int(value) or int(inference_pb2.PRIORITY_DEFAULT)
