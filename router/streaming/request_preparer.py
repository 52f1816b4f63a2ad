"""Makes a new sequence of what a client sends: checked, tokenized, and with a concrete value in every field."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any, cast

from octavo.net.security.api_keys import salt_of
from octavo.net.security.authorizer import ONE_TENANT, Authorizer
from octavo.pictures.long_speech import refuse_beside_times
from octavo.pictures.picture import pack_pictures
from octavo.pictures.reader import NOTHING_SHOWN, PictureLimits, ReadPicture, ShownPictures
from octavo.request import hashing, limits, sampling_validation, validation
from octavo.request.errors import InvalidArgument, NoWorkers, ViolationCollector
from octavo.request.ids import Incarnation, RequestId, new_request_id, sequence_id
from octavo.request.record import NewSequence
from octavo.request.sampling import PARAMETERS, SamplingParams
from octavo.text.thinking import with_thinking_marks
from octavo.text.tokenizers.byte_tokenizer import no_tokenizer
from octavo.v1 import inference_pb2, types_pb2
from octavo.wire.public import sampling_bytes, sampling_from_wire, with_recommended
from octavo.wire.requests import request_hash
from router.fleet.model_registry import ModelRegistry, ServedModel
from router.named.named_adapters import NamedAdapters
from router.named.named_prefixes import NamedPrefixes
from router.streaming.prompts.asked_prompt import CheckedChat, check_input, checked_input
from router.streaming.prompts.bad_words import check_words, without_words
from router.streaming.prompts.chat_threads import ChatThreads, run_aside
from router.streaming.prompts.grammar_checks import GrammarChecks
from router.streaming.prompts.picture_prompts import PicturePrompts
from router.streaming.prompts.prefixed import with_prefix
from router.streaming.prompts.prompt_ends import (
    asking_of_sound,
    check_truncation,
    encoded_text,
    refuse_encoded,
    refuse_unspoken,
    truncated,
    with_beginning,
)

TENANT = ONE_TENANT
TOKEN_BYTES = 8  # an id of three bytes and its text, on average
SCORE_BYTES = 13  # a TokenLogprob: an id of three bytes, a float of four, and the tags and lengths around them
SAFE_BYTES = limits.MAX_MESSAGE_BYTES * 7 // 8  # texts may be longer than the average


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that has passed every check."""

    new: NewSequence
    model: ServedModel
    params: SamplingParams
    source: str  # of the request, from which the prompt came
    pictures: Mapping[str, bytes] = field(default_factory=dict)  # their pixels, by digest
    fetched: Sequence[bytes] = ()  # of each picture, in the order of the chat: what its URL brought, if it had one


class RequestPreparer:
    """Checks requests and tokenizes them. Raises what is wrong with one, or NoWorkers if no worker serves the model."""

    def __init__(
        self,
        models: ModelRegistry,
        router_id: Incarnation,
        authorizer: Authorizer | None = None,
        *,
        prefixes: NamedPrefixes | None = None,
        adapters: NamedAdapters | None = None,
        pictures: PicturePrompts | None = None,
        wait_for_workers: bool = False,
    ) -> None:
        """The authorizer says whose request it is. Without one, all are of one tenant.

        With `wait_for_workers` a request for a known model may come before the model's first worker.
        """
        self.models = models
        self._router_id = router_id
        self.authorizer = authorizer or Authorizer()
        self._chat_threads = ChatThreads()
        self._grammars = GrammarChecks()
        self._prefixes = prefixes
        self._adapters = adapters
        self.pictures = pictures or PicturePrompts(PictureLimits())
        self._wait_for_workers = wait_for_workers

    async def prepare(self, request: inference_pb2.GenerateRequest, deadline_in_ms: int = 0) -> PreparedRequest:
        """The sequence that the request asks for. A `deadline_in_ms` of 0 means that there is no deadline."""
        await self.look_up(request)
        model, adapter = self.find_model(request), self._adapters and self._adapters.asked(*names_in(request))
        if not model.workers and not self._wait_for_workers:
            raise NoWorkers(f"no worker serves {model.name} now: retry, or start one", retry_after_ms=500)
        asked, params = check_request(request, model)
        self.pictures.check_chat(request.chat, model)
        if params.stop and not model.tokenizer.has_text:
            raise no_tokenizer("send stop_token_ids instead of stop")
        params = without_words(asking_of_sound(params, request, model), request.bad_words, model)
        try:
            params = with_thinking_marks(params, model.tokenizer)
        except InvalidArgument as error:
            raise error.inside("sampling") from None
        request_id = RequestId(request.request_id) if request.HasField("request_id") else new_request_id()
        tenant, source = self.authorizer.current_tenant(), cast("str", request.WhichOneof("input"))
        token_ids, shown = await self._read_shown(request, model)
        token_ids = model.encoder.prompt_of(token_ids, source)
        context = model.encoder.context_for(len(token_ids), model.context_tokens)
        validation.validate_prompt(token_ids, vocab_size=model.vocab_size, context_tokens=context, field=source)
        model.pictures.check_prompt(token_ids, shown.placed, source)
        params = sampling_validation.resolve(
            params, prompt_len=len(token_ids), context_tokens=context, seed_source=lambda: secrets.randbits(63)
        )
        if params.constraint is not None:
            if not model.tokenizer.has_text:
                raise no_tokenizer("leave out constraint")
            params = replace(params, constraint=await self._grammars.checked(params.constraint))
        new = NewSequence(
            seq_id=sequence_id(tenant, request_id),
            request_id=request_id,
            body_hash=request_hash(request, asked),
            tenant=tenant,
            salt=model.encoder.salt_of(salt_of(tenant), token_ids),
            model=model.fingerprint,
            layout=model.layout,
            sampling=sampling_bytes(params),
            prompt=token_ids,
            prompt_chain=hashing.prompt_chain(token_ids),
            num_branches=params.num_branches,
            max_tokens=params.max_tokens or 0,
            priority=priority_of(request.priority),
            deadline_in_ms=deadline_in_ms,
            keep_on_disconnect=request.on_disconnect == inference_pb2.ON_DISCONNECT_KEEP,
            router=self._router_id,
            lora=adapter.digest if adapter else "",
            lora_source=adapter.source if adapter else "",
            pictures=pack_pictures(shown.placed),
        )
        return PreparedRequest(new, model, params, source, shown.pixels, shown.fetched)

    async def look_up(
        self,
        request: "inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest | inference_pb2.DetokenizeRequest",
    ) -> None:
        """Before `find_model`: an adapter that the request names may have been added a moment ago, elsewhere."""
        if self._adapters is not None:
            await self._adapters.look_up(*names_in(request))

    def find_model(
        self,
        request: "inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest | inference_pb2.DetokenizeRequest",
    ) -> ServedModel:
        """The model that the request names, or the only one. The name of an adapter means the adapter's model."""
        if self._adapters is not None:
            return self._adapters.model_of(*names_in(request))
        return self.models.find_by_name(request.model if request.HasField("model") else None)

    def adapter_names(self, model: ServedModel, digest: str) -> list[str]:
        """The names that an adapter of the model has now."""
        return self._adapters.names_of(model, digest) if self._adapters is not None and digest else []

    async def read_prompt(
        self, request: "inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest", model: ServedModel
    ) -> list[int]:
        """Tokenizes the prompt, unless the client has sent tokens. A named prefix comes first."""
        return (await self._read_shown(request, model))[0]

    async def _read_shown(
        self,
        request: "inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest",
        model: ServedModel,
        sent: "inference_pb2.Chat | None" = None,
    ) -> tuple[list[int], ShownPictures]:
        """The prompt, and the pictures that it shows. `sent`: the chat by whose fields pictures are refused."""
        tenant, pictures = self.authorizer.current_tenant(), list[ReadPicture]()
        if isinstance(request, inference_pb2.GenerateRequest) and request.HasField("prefix"):
            refuse_encoded("prefix", model)
            return await self._read_with_prefix(request, model, tenant)
        if isinstance(request, inference_pb2.GenerateRequest) and refuse_unspoken(request, model):
            return await self.pictures.read_spoken(request.speech, model, salt_of(tenant))
        match checked_input(request, model):
            case str() as text:
                token_ids = await run_aside(len(text), lambda: encoded_text(text, request, model))
            case CheckedChat() as chat:
                pictures = await self.pictures.read(sent or request.chat, model, salt_of(tenant))
                token_ids = await self._chat_threads.run(
                    model.name, chat.size, partial(chat.tokenized_by, model.tokenizer)
                )
            case given:
                token_ids = list(given)
        if request.HasField("add_special_tokens") and not model.encoder.exists:
            token_ids = with_beginning(token_ids, request, model)
        if isinstance(request, inference_pb2.GenerateRequest):
            if pictures and request.HasField("truncate_prompt_tokens"):
                raise InvalidArgument("truncate_prompt_tokens", "does not go with pictures; leave it out")
            token_ids = truncated(token_ids, request, model)
        return self.pictures.placed(token_ids, pictures, model)

    def note_accepted(self, new: NewSequence) -> None:
        """Counts a new request by the named prefix with which its prompt begins."""
        if self._prefixes is not None:
            self._prefixes.note_prompt(new.model, new.tenant, new.prompt)

    async def _read_with_prefix(
        self, request: inference_pb2.GenerateRequest, model: ServedModel, tenant: str
    ) -> tuple[list[int], ShownPictures]:
        """The prompt of a request that names its beginning."""
        if self._prefixes is None:
            raise InvalidArgument("prefix", "is not known here")
        named = await self._prefixes.find(model.fingerprint, tenant, request.prefix)
        whole = with_prefix(request, named)
        whole.ClearField("prefix")
        if named.is_system:
            return await self._read_shown(whole, model, request.chat)
        if whole.WhichOneof("input") != "token_ids":
            whole.add_special_tokens = False  # the prefix has those of the beginning
        return [*named.tokens, *await self.read_prompt(whole, model)], NOTHING_SHOWN

    async def beginning(self, model: ServedModel, text: str, *, is_system: bool) -> list[int]:
        """The tokens with which all prompts begin that have this system message, or this text.

        Raises InvalidArgument.
        """
        refuse_encoded("text", model)
        validation.validate_text(text, "system" if is_system else "text", context_tokens=model.context_tokens)
        if not is_system:
            return await self.read_prompt(inference_pb2.GenerateRequest(text=text), model)
        chats = []
        for said in ("a", "0"):
            messages = [
                inference_pb2.ChatMessage(role=role, content=each) for role, each in (("system", text), ("user", said))
            ]
            request = inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=messages))
            chats.append(await self.read_prompt(request, model))
        return [first for first, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*chats, strict=False))]

    async def detokenize(self, request: inference_pb2.DetokenizeRequest) -> str:
        """The text of the tokens in the request."""
        await self.look_up(request)
        model = self.find_model(request)
        if not model.tokenizer.has_text:
            raise no_tokenizer("keep the token ids")
        sampling_validation.check_token_ids("token_ids", request.token_ids, model.vocab_size)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        ids = list(request.token_ids)
        return await run_aside(len(ids), lambda: model.tokenizer.decode(ids, skip))


def names_in(
    request: "inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest | inference_pb2.DetokenizeRequest",
) -> tuple[str | None, str | None]:
    """The model and the adapter that a request names."""
    model = request.model if request.HasField("model") else None
    if isinstance(request, inference_pb2.GenerateRequest) and request.HasField("lora"):
        return model, request.lora
    return model, None


def check_request(request: inference_pb2.GenerateRequest, model: ServedModel) -> tuple[SamplingParams, SamplingParams]:
    """The sampling parameters of a request in which all is right that can be checked without tokenizing.

    They come twice: as the client sent them, and with what the model recommends. Raises InvalidArgument with all that
    is wrong.
    """
    checks = ViolationCollector()
    if request.HasField("request_id"):
        checks.run(validation.validate_request_id, request.request_id)
    both = checks.run(checked_sampling, request.sampling, model, inside="sampling")
    if both and request.speech.times:
        checks.run(refuse_beside_times, partial(getattr, both[1]), inside="sampling")
    checks.run(priority_of, request.priority)
    checks.run(check_truncation, request, model)
    checks.run(check_words, request.bad_words)
    if checks.found:
        checks.run(check_input, request, model)
    checks.raise_found()
    return both or (SamplingParams(), SamplingParams())


def checked_sampling(message: types_pb2.SamplingParams, model: ServedModel) -> tuple[SamplingParams, SamplingParams]:
    """The parameters without and with what the model recommends. Raises InvalidArgument with all that is wrong."""
    checks = ViolationCollector()
    for row in PARAMETERS.values():
        if row.most is not None:
            checks.run(row.check_count, getattr(message, row.name))
    if checks.found:  # what is wrong beside lists that are too long is found without them
        long_lists, whole = checks.found, message
        message = types_pb2.SamplingParams()
        message.CopyFrom(whole)
        for violation in long_lists:
            message.ClearField(cast("Any", violation.field))
    asked = sampling_from_wire(message)
    params = with_recommended(asked, message, model.sampling_defaults)
    vocab_size, ends = model.vocab_size, model.eos_token_ids
    checks.run(sampling_validation.validate_sampling, params, vocab_size=vocab_size, eos_token_ids=ends)
    checks.run(model.encoder.check_sampling, params)
    checks.raise_found()
    return asked, params


def priority_of(value: "inference_pb2.Priority") -> int:
    """The class of a request; the default one if it has none. Raises InvalidArgument for an unknown class."""
    if value not in inference_pb2.Priority.values():
        raise InvalidArgument("priority", f"no class {int(value)}; use one of SYSTEM, INTERACTIVE, DEFAULT, BULK")
    return int(value) or int(inference_pb2.PRIORITY_DEFAULT)


def check_answer_fits(params: SamplingParams, prompt_len: int) -> None:
    """Raises InvalidArgument if an answer with all tokens that `params` (resolved) allow is too large for Complete."""
    num_tokens = params.n * (params.max_tokens or 0)
    scores = [0 if each is None else SCORE_BYTES * (1 + each) for each in (params.logprobs, params.prompt_logprobs)]
    parts = {
        "max_tokens": num_tokens * TOKEN_BYTES,
        "logprobs": num_tokens * scores[0],
        "prompt_logprobs": prompt_len * scores[1],
    }
    total = sum(parts.values())
    if total > SAFE_BYTES:
        largest = max(parts, key=lambda name: parts[name])
        raise InvalidArgument(
            f"sampling.{largest}",
            f"the answer may have {total / limits.MIB:.1f} MiB, and Complete answers with at most "
            f"{SAFE_BYTES / limits.MIB:g}; call Generate, which streams it, or ask for less",
        )
