"""The paths of the API, as one ASGI application, and which models and aliases there are."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from octavo.net.http_server import error_body
from octavo.net.security.authorizer import Authorizer
from octavo.request.errors import PermissionDenied, ServingError, Unauthenticated, closest
from router.fleet.model_registry import ModelRegistry, ServedModel
from router.http.answer_format import ChatFormat, CompletionFormat
from router.http.answers import AnswerService, NewAnswer, called
from router.http.bodies.chat_body import read_chat
from router.http.bodies.completion_body import read_completion
from router.http.bodies.json_body import header_of
from router.http.messages.message_endpoint import MessageEndpoint
from router.http.messages.message_reply import MessageReply
from router.http.paths.adapters import AdapterEndpoint
from router.http.paths.other_paths import instead_of
from router.http.paths.several_answers import SeveralAnswers
from router.http.paths.text_calls import TextCall, TokenizerInfoEndpoint, VersionEndpoint, detokenize, tokenize
from router.http.paths.transcriptions import TranscriptionEndpoint
from router.http.reply import Reply
from router.http.requests import RequestEndpoint
from router.http.responses.create_endpoint import CreateEndpoint
from router.http.responses.stored_endpoint import StoredEndpoint
from router.http.vectors.embeddings import answer_embeddings
from router.http.vectors.rankings import answer_rerank, answer_score
from router.http.vectors.vector_endpoint import VectorEndpoint
from router.named.named_adapters import NamedAdapters
from router.streaming.inference_service import InferenceService

RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
SCORE_PATHS = ("/score", "/v1/score")
FORM_PATHS = ("/v1/audio/transcriptions",)  # of which a body is a form


class ModelEndpoint:
    """The endpoint of the list and of each model."""

    def __init__(self, models: ModelRegistry, adapters: NamedAdapters) -> None:
        self._models = models
        self._adapters = adapters
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply, name = Reply(send, called(scope)), scope["path_params"].get("name")
        try:
            if name is None:
                await reply.send_object({"object": "list", "data": self._shown_all()})
            else:
                await self._adapters.look_up(name)
                await reply.send_object(self._shown(self._adapters.model_of(name), name))
        except ServingError as error:
            await reply.send_error(error)

    def _shown_all(self) -> list[dict[str, Any]]:
        models = self._models.list_models()
        shown = [self._shown(model, name) for model in models for name in (model.name, *self._models.aliases_of(model))]
        by_name = {model.name: model for model in models}
        there = [adapter for adapter in self._adapters.all() if adapter.model in by_name]
        return shown + [self._shown(by_name[adapter.model], adapter.name) for adapter in there]

    def _shown(self, model: ServedModel, name: str) -> dict[str, Any]:
        """A model as OpenAI shows one, and the most tokens of prompt and output together; an adapter as vLLM does."""
        adapter = self._adapters.find(name) if name != model.name else None
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "octavo",
            "root": model.name,
            **({"parent": adapter.model} if adapter else {}),
            "max_model_len": model.context_tokens,
        }


class OpenAiApp:
    """The application. `is_serving` says whether a new request would be served now."""

    def __init__(
        self,
        service: AnswerService,
        inference: InferenceService,
        adapters: AdapterEndpoint,
        models: ModelRegistry,
        authorizer: Authorizer,
        is_serving: Callable[[], bool],
    ) -> None:
        self._authorizer = authorizer
        self._is_serving = is_serving
        listed = ModelEndpoint(models, adapters.adapters)
        vectors = partial(VectorEndpoint, inference.pooling, service.bodies, unknown_fields=service.unknown_fields)
        self._router = Router(
            [
                Route("/v1/completions", SeveralAnswers(service, read_completion, CompletionFormat), methods=["POST"]),
                Route("/v1/chat/completions", NewAnswer(service, read_chat, ChatFormat), methods=["POST"]),
                Route("/v1/messages", MessageEndpoint(service), methods=["POST"]),
                Route("/v1/messages/count_tokens", MessageEndpoint(service, counts_only=True), methods=["POST"]),
                *(Route(path, TranscriptionEndpoint(service), methods=["POST"]) for path in FORM_PATHS),
                Route("/v1/responses", CreateEndpoint(service), methods=["POST"]),
                *(
                    Route(f"/v1/responses/{{response_id}}/{what}", StoredEndpoint(service, what), methods=[method])
                    for what, method in (("cancel", "POST"), ("input_items", "GET"))
                ),
                Route("/v1/responses/{response_id}", StoredEndpoint(service), methods=["GET", "DELETE"]),
                *(Route(f"/v1/{what}_lora_adapter", adapters, methods=["POST"]) for what in ("load", "unload")),
                Route("/v1/models", listed, methods=["GET"]),
                Route("/v1/models/{name:path}", listed, methods=["GET"]),
                Route("/v1/requests/{request_id:path}", RequestEndpoint(service, inference), methods=["GET", "DELETE"]),
                Route("/tokenize", TextCall(service, tokenize), methods=["POST"]),
                Route("/detokenize", TextCall(service, detokenize), methods=["POST"]),
                Route("/tokenizer_info", TokenizerInfoEndpoint(service), methods=["GET"]),
                Route("/version", VersionEndpoint(), methods=["GET"]),
                Route("/v1/embeddings", vectors("embd-", answer_embeddings), methods=["POST"]),
                *(Route(path, vectors("rerank-", answer_rerank), methods=["POST"]) for path in RERANK_PATHS),
                *(Route(path, vectors("score-", answer_score), methods=["POST"]) for path in SCORE_PATHS),
                Route("/health", self._tell_health, methods=["GET"]),
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # so that the router raises what it cannot serve
        try:
            if scope["path"] != "/health":
                self._authorizer.authorize_request(with_bearer(scope))  # the tenant is that of this task from now on
            await self._router(scope, receive, send)
        except (Unauthenticated, PermissionDenied) as error:
            kind = MessageReply if scope["path"].startswith("/v1/messages") else Reply
            await kind(send, called(scope)).send_error(error)
        except HTTPException as error:
            methods = (error.headers or {}).get("Allow")
            known = [route.path for route in self._router.routes if isinstance(route, Route)]
            usual = f"this path takes {methods}" if methods else f"no such path{closest(scope['path'][:200], known)}"
            what = instead_of(scope["path"]) or usual
            body = error_body(f"{scope['method']} {scope['path'][:200]}: {what}", "invalid_request_error")
            headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
            await Reply(send, called(scope)).send_object(body, error.status_code, headers)

    async def _tell_health(self, request: Request) -> Response:
        serving = self._is_serving()
        headers = {"x-request-id": name} if (name := called(request.scope)) else None
        return JSONResponse({"status": "serving" if serving else "not_serving"}, 200 if serving else 503, headers)


def with_bearer(scope: Scope) -> Scope:
    """The scope with the key of `x-api-key`, as Anthropic's clients send it, where the others' clients have theirs."""
    if header_of(scope, b"authorization") or not (key := header_of(scope, b"x-api-key")):
        return scope
    return {**scope, "headers": [*scope["headers"], (b"authorization", f"Bearer {key}".encode("latin-1"))]}
