"""GET /v1/models and /v1/models/{id}: which models and aliases there are."""

import time
from typing import Any

from starlette.types import Receive, Scope, Send

from octavo.request.errors import ServingError
from router.fleet.model_registry import ModelRegistry, ServedModel
from router.http.reply import Reply


class ModelEndpoint:
    """The endpoint of the list and of each model."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply, name = Reply(send), scope["path_params"].get("name")
        try:
            if name is None:
                await reply.send_object({"object": "list", "data": self._shown_all()})
            else:
                await reply.send_object(self._shown(self._models.find_by_name(name), name))
        except ServingError as error:
            await reply.send_error(error)

    def _shown_all(self) -> list[dict[str, Any]]:
        models = self._models.list_models()
        return [self._shown(model, name) for model in models for name in (model.name, *self._models.aliases_of(model))]

    def _shown(self, model: ServedModel, name: str) -> dict[str, Any]:
        """A model as OpenAI shows one, and the most tokens of prompt and output together."""
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "octavo",
            "root": model.name,
            "max_model_len": model.context_tokens,
        }
