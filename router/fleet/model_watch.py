"""What the store remembers of models, for routers that know a model before any worker of it lives.

A request needs its model's tokenizer, vocabulary and limits, which only workers tell. With `--wait-for-workers` routers
keep them in the store, so that a router which starts while all workers are scaled away accepts requests none the less.
"""

import asyncio
import json
import logging
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields

from octavo.model_files.lora_support import LoraSupport
from octavo.pictures.support import PictureSupport
from octavo.request.errors import StoreUnavailable
from octavo.request.ids import Incarnation
from octavo.request.record import WorkerRole
from octavo.store.base import Store
from octavo.text.encoded_prompt import EncoderSupport, SpeechSupport
from router.fleet.model_registry import ModelRegistry, WorkerFacts
from router.fleet.worker_pool import WorkerPool

log = logging.getLogger(__name__)

EXCHANGE_S = 2.0
OF_ONE_WORKER = {  # and not of its model
    "worker_id": "",
    "incarnation": Incarnation(""),
    "role": WorkerRole.BOTH,
    "lora_support": LoraSupport(),
}
_NAMES = {field.name for field in fields(WorkerFacts)}


@dataclass(eq=False)
class ModelWatch:
    """Tells the store of the models that workers brought here, and this router of those that the store remembers."""

    store: Store
    models: ModelRegistry
    pool: WorkerPool
    _seen: dict[str, bytes] = field(default_factory=dict)  # what the store has, by name: written or read here last

    async def exchange(self) -> None:
        """Writes and reads once, and waits. The router repeats this for as long as it lives."""
        with suppress(StoreUnavailable):  # the next round says the same
            for facts in [link.facts for link in self.pool.links.values() if link.facts]:
                if self._seen.get(facts.model) != (description := description_of(facts)):
                    await self.store.describe_model(facts.model, description)
                    self._seen[facts.model] = description
            for name, description in (await self.store.model_descriptions()).items():
                is_new, self._seen[name] = self._seen.get(name) != description, description
                if is_new and not self.models.has(name):
                    await self._add(name, description)
        await asyncio.sleep(EXCHANGE_S)

    async def _add(self, name: str, description: bytes) -> None:
        try:
            facts = facts_in(description)
        except (
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
        ) as error:  # of another release: a worker will describe it
            log.warning("what the store says of model %s cannot be read: %r", name, error)
            return
        if refusal := await self.models.add_model(facts):
            log.warning("model %s, which waits for workers: %s", name, refusal)


def description_of(facts: WorkerFacts) -> bytes:
    """The description that all workers of the model share."""
    return json.dumps({name: value for name, value in asdict(facts).items() if name not in OF_ONE_WORKER}).encode()


def facts_in(description: bytes) -> WorkerFacts:
    """The facts of a worker that brought this description. Raises AttributeError, KeyError, TypeError or ValueError."""
    said = {name: value for name, value in json.loads(description).items() if name in _NAMES} | OF_ONE_WORKER
    pictures = PictureSupport(**said.get("pictures", {}))  # a description of an earlier release has none
    encoder = said.get("encoder", {})
    speech = SpeechSupport(**encoder["speech"]) if encoder.get("speech") else None
    encoder = EncoderSupport(**encoder | {"start": tuple(encoder.get("start", ())), "speech": speech})
    models = {"eos_token_ids": tuple(said["eos_token_ids"]), "pictures": pictures, "encoder": encoder}
    return WorkerFacts(**said | models)
