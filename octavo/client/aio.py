"""The client for asyncio. `octavo.client.sync` is the client for code without asyncio."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc

from octavo.client.arguments import (
    Messages,
    PriorityName,
    Prompt,
    RequestArguments,
    Speech,
    detokenize_request,
    embed_request,
    fill_prompt,
    generate_request,
    make_sampling,
    sampling_message,
    score_request,
    set_bad_words,
    set_variables,
)
from octavo.client.events import (
    Completion,
    Embeddings,
    Model,
    RequestStatus,
    Scores,
    Transcript,
    Utterance,
    embeddings_of,
    model_of,
    scores_of,
    status_of,
)
from octavo.client.receiver import StreamReceiver
from octavo.client.routing import CellPools, EndpointPool, Recovery, RetryBudget, RetryPolicy
from octavo.client.stream import AsyncStream, collect
from octavo.request import errors, ids
from octavo.request.sampling import SamplingArguments, SamplingParams
from octavo.v1 import inference_pb2
from octavo.wire.endpoint import Endpoints
from octavo.wire.tls import PLAIN, ClientCredentials

UNARY_TIMEOUT_S = 30.0
VECTORS_TIMEOUT_S = 300.0

Reply = TypeVar("Reply")


class AsyncClient:
    """Calls any of the routers of one deployment, or of several cells ("a:1,b:1;c:1,d:1": see docs/cells.md).

    A request goes to the cell that its id names, and so does every call about it.
    Every call is retried where that can help. A stream that breaks is attached again, on the next router. All errors
    are ServingErrors. A client belongs to the event loop in which it is first used; close it, or use `async with`.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        *,
        policy: RetryPolicy = RetryPolicy(),  # noqa: B008  frozen: one for all
        credentials: ClientCredentials = PLAIN,
    ) -> None:
        """With `credentials`, calls go over TLS, or with an API key, or both."""
        self._cells = CellPools(endpoints, credentials)
        self._policy = policy
        self._budget = RetryBudget(policy.retry_ratio, policy.min_retries)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._cells.close()

    async def connect(self, timeout_s: float = 5.0) -> None:
        """Returns once one of the routers is connected, which no call needs. Raises Unreachable after `timeout_s`."""
        await self._cells.connect(timeout_s)

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        model: str | None = None,
        request_id: str | None = None,
        deadline_s: float | None = None,
        priority: PriorityName = "",
        keep_on_disconnect: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        bad_words: str | Sequence[str] = (),
        prefix: str | None = None,
        lora: str | None = None,
        **parameters: Unpack[SamplingArguments],
    ) -> AsyncStream:
        """Continues `prompt`: text, token ids, or chat messages, each {"role": …, "content": …} or such a pair.

        `chat_template_kwargs` are variables of the model's chat template, such as {"enable_thinking": False}.
        No output contains one of `bad_words`, alone or after a space. `prefix` names the beginning of the prompt, which
        an operator has added (`octavo prefix add`), and `lora` the adapter that computes with the model (`octavo
        adapter add`).
        `parameters` are fields of SamplingParams, on top of `sampling`. Without `sampling`, fields left out get the
        values that the model recommends (`Model.defaults`); with it, every field is sent. The request starts with
        the first `anext`.
        Raises InvalidArgument, before anything is sent, for an argument that does not exist.
        """
        named = None if sampling else [name for name, value in parameters.items() if value is not None]
        sampling = make_sampling(sampling, parameters)
        request_id = request_id or ids.new_request_id()
        request = generate_request(
            prompt,
            sampling_message(sampling, named),
            request_id=request_id,
            model=model,
            priority=priority,
            keep=keep_on_disconnect,
        )
        set_variables(request, chat_template_kwargs)
        set_bad_words(request, bad_words)
        if prefix is not None:
            request.prefix = prefix
        if lora is not None:
            request.lora = lora
        receiver = StreamReceiver(num_branches=sampling.n)
        return AsyncStream(self._cells.pool_of(request_id), request, receiver, self._recovery(deadline_s))

    async def complete(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[RequestArguments]
    ) -> Completion:
        """The whole answer that `generate` would stream. It has the parameters of `generate`."""
        return await collect(self.generate(prompt, sampling, **options))

    async def transcribe(
        self,
        speech: Speech,
        *,
        on_utterance: Callable[[Utterance], None] | None = None,
        condition_on_previous_text: bool = False,
        temperature_increment_on_fallback: float = 0.0,
        no_speech_threshold: float | None = None,
        logprob_threshold: float | None = None,
        **options: Unpack[RequestArguments],
    ) -> Transcript:
        """All that is said in a sound of any length, and when: by one request after another, each of a part of it.

        A model of several languages is asked which one it is, if `speech` does not say it. `on_utterance` gets each
        text as soon as its end is known. With `condition_on_previous_text` the model goes on from what it has written
        of the parts before, which keeps names and style, and mistakes. With `temperature_increment_on_fallback`, such
        as 0.2, a part whose output repeats itself or is unlikely is asked for again, at a temperature so much higher,
        up to 1, and texts come when their part is believed. With `no_speech_threshold`, such as 0.6, a part is left out
        if its output is unlikely and it is likelier than this that nobody speaks there; an output is unlikely whose
        average log probability is below `logprob_threshold`, by default -1. `options` are those of `generate`, for
        each part; temperature 0 is the default, `request_id` begins the ids of all parts, and `deadline_s` is for all.
        """
        from octavo.client.transcripts import Transcriber
        from octavo.pictures.long_speech import SpeechOptions

        how = SpeechOptions(
            *(condition_on_previous_text, temperature_increment_on_fallback, no_speech_threshold, logprob_threshold)
        )
        return await Transcriber(self, speech, on_utterance, options, how).run()

    def attach(
        self,
        request_id: str | None = None,
        *,
        next_indexes: Sequence[int] = (),
        resume_token: bytes = b"",
        deadline_s: float | None = None,
    ) -> AsyncStream:
        """The stream of a request that was accepted before, from its next indexes or a resume token on.

        A resume token needs the request id beside it only where there are several cells. The stream raises ForeignToken
        if no router can read the token any more: attach by request id and next indexes.
        """
        if not request_id and not resume_token:
            raise errors.InvalidArgument("request_id", "give a request id or a resume token")
        if resume_token and next_indexes:
            raise errors.InvalidArgument("next_indexes", "the resume token says where the stream goes on")
        pool = self._cells.pool_for_resume(request_id)
        if resume_token:
            opening = inference_pb2.AttachRequest(resume_token=resume_token)
        else:
            opening = inference_pb2.AttachRequest(request_id=request_id, next_indexes=next_indexes)
        receiver = StreamReceiver(None if resume_token else tuple(next_indexes))
        return AsyncStream(pool, opening, receiver, self._recovery(deadline_s))

    async def cancel(self, request_id: str) -> None:
        """Stops a request. It is no error if the request has ended already."""
        request = inference_pb2.CancelRequest(request_id=request_id)
        await self._call("Cancel", request, lambda _: None, self._cells.pool_of(request_id))

    async def get(self, request_id: str) -> RequestStatus:
        """The status of a request, by its record."""
        request = inference_pb2.GetRequest(request_id=request_id)
        return await self._call("Get", request, status_of, self._cells.pool_of(request_id))

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        model: str | None = None,
        dimensions: int | None = None,
        pooling: str = "",
        normalize: bool | None = None,
        deadline_s: float = VECTORS_TIMEOUT_S,
    ) -> Embeddings:
        """A vector for each input, a text or token ids: at most 2048. `pooling` is "last" or "mean".

        What is left out follows from the model's files. Nothing is stored of the call: it is repeated as a whole.
        """
        request = embed_request(inputs, model, dimensions, pooling, normalize)
        return await self._call("Embed", request, embeddings_of, timeout_s=deadline_s)

    async def score(
        self,
        left: str | Sequence[str],
        right: str | Sequence[str],
        *,
        model: str | None = None,
        method: str = "",
        instruction: str = "",
        deadline_s: float = VECTORS_TIMEOUT_S,
    ) -> Scores:
        """A score for each pair of texts; one text on the left is compared with each on the right.

        `method` is "cosine" of two vectors or "qwen3", of a reranker; left out, it is what the model is for.
        """
        request = score_request(left, right, model, method, instruction)
        return await self._call("Score", request, scores_of, timeout_s=deadline_s)

    async def tokenize(self, text: str | bytes | Messages, *, model: str | None = None) -> list[int]:
        """The token ids of a text, or of the prompt that the chat template makes of messages."""
        request = inference_pb2.TokenizeRequest(model=model)
        fill_prompt(request, text)
        return await self._call("Tokenize", request, lambda reply: list(reply.token_ids))

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str | None = None, skip_special_tokens: bool = True
    ) -> str:
        """The text of token ids. Bytes that are not UTF-8 become U+FFFD."""
        request = detokenize_request(token_ids, model, skip_special_tokens)
        return await self._call("Detokenize", request, lambda reply: str(reply.text))

    async def models(self) -> list[Model]:
        """The models that the routers serve."""
        return await self._call(
            "ListModels", inference_pb2.ListModelsRequest(), lambda reply: list(map(model_of, reply.models))
        )

    def _recovery(self, deadline_s: float | None) -> Recovery:
        self._budget.deposit()
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        return Recovery(self._policy, self._budget, deadline)

    async def _call(
        self,
        method: str,
        request: Any,
        convert_reply: Callable[[Any], Reply],
        pool: EndpointPool | None = None,
        timeout_s: float = UNARY_TIMEOUT_S,
    ) -> Reply:
        """The reply to a unary call, retried where that can help: every unary call may be repeated.

        A call that is about no request has no `pool`: any cell can answer it.
        """
        recovery = self._recovery(timeout_s)
        pool = pool or self._cells.next_pool()
        endpoint = pool.first()
        while True:
            try:
                stub_call: Callable[..., Awaitable[Any]] = getattr(pool.stub(endpoint), method)
                reply = await stub_call(request, timeout=timeout_s)
                if reply is not None:
                    pool.note_answer(endpoint)
                    return convert_reply(reply)
                error = pool.unreadable(endpoint)
            except grpc.RpcError as failed:
                error = pool.error_of(endpoint, failed)
            delay = recovery.delay_s(error)
            endpoint = pool.after(endpoint)
            await asyncio.sleep(delay)
