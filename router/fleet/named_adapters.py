"""The low-rank adapters that operators have named, as the store has them, and which of them a request asks for."""

import asyncio
import logging
from pathlib import Path

from octavo.model_files.lora_files import read_lora
from octavo.request import limits
from octavo.request.errors import InvalidArgument, NotFound, StoreUnavailable, TooManyAdapters
from octavo.request.named_adapter import MAX_ADAPTERS, NamedAdapter, validate_adapter_name
from octavo.store.base import Store
from octavo.v1 import inference_pb2
from router.fleet.model_registry import ModelRegistry, ServedModel

log = logging.getLogger(__name__)

ROUND_S = 1.0
Named = inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest | inference_pb2.DetokenizeRequest


class NamedAdapters:
    """What this router knows of them. It reads them anew every second."""

    def __init__(self, store: Store, models: ModelRegistry) -> None:
        self._store = store
        self._models = models
        self._packed: dict[str, bytes] = {}
        self._known: dict[str, NamedAdapter] = {}

    async def keep(self) -> None:
        """One round, with the pause after it."""
        try:
            await self.refresh()
        except StoreUnavailable:
            log.debug("the store does not answer: adapters are those known before")
        await asyncio.sleep(ROUND_S)

    async def refresh(self) -> None:
        """Reads what the store has. Raises StoreUnavailable."""
        packed = await self._store.adapters()
        if packed == self._packed:
            return
        self._packed, self._known = packed, {}
        for name, value in packed.items():
            try:
                self._known[name] = NamedAdapter.parse(value)
            except (ValueError, TypeError, KeyError) as error:
                log.warning("the adapter %r in the store cannot be read: %r", name, error)

    def all(self) -> list[NamedAdapter]:
        """In the order of their names."""
        return sorted(self._known.values(), key=lambda adapter: adapter.name)

    def find(self, name: str) -> NamedAdapter | None:
        return self._known.get(name)

    async def add(self, name: str, source: str, model: str | None = None) -> NamedAdapter:
        """Reads the adapter in a folder of this machine, and names it. A name that is there gets this one.

        Raises InvalidArgument, NotFound, BadModel, NoWorkers, TooManyAdapters or StoreUnavailable.
        """
        validate_adapter_name("name", name)
        base = self._models.find_by_name(model)
        if self._models.has_name(name):
            raise InvalidArgument("name", f"{name} is the name of a model: choose another one")
        if not source.startswith("/") or len(source) > limits.MAX_ADAPTER_SOURCE:
            what = f"must be an absolute path of at most {limits.MAX_ADAPTER_SOURCE} characters"
            raise InvalidArgument("source", f"{what}, which this router and all workers can read")
        files = await asyncio.to_thread(read_lora, Path(source))
        adapter = NamedAdapter(name, base.name, files.digest, source, files.rank, files.num_bytes)
        if not await self._store.put_adapter(name, adapter.pack(), MAX_ADAPTERS):
            raise TooManyAdapters(f"there are {MAX_ADAPTERS} adapters: remove one")
        await self.refresh()
        log.info("adapter %s of %s is %s, from %s", name, base.name, files.digest, source)
        return adapter

    async def remove(self, name: str) -> None:
        """Raises NotFound, StoreUnavailable."""
        if not await self._store.drop_adapter(name):
            raise _missing("name", name)
        await self.refresh()

    async def look_up(self, request: Named) -> None:
        """Reads the store once more if the request names what this router does not know: it may be a moment old."""
        names = {request.model} if request.HasField("model") else set()
        if isinstance(request, inference_pb2.GenerateRequest) and request.HasField("lora"):
            names = {request.lora}
        if any(not self._models.has_name(name) and name not in self._known for name in names):
            await self.refresh()

    def of_request(self, request: Named) -> NamedAdapter | None:
        """The adapter that the request asks for, by `lora` or by the name of its model. Raises NotFound."""
        if isinstance(request, inference_pb2.GenerateRequest) and request.HasField("lora"):
            if request.lora not in self._known:
                raise _missing("lora", request.lora)
            return self._known[request.lora]
        if request.HasField("model") and not self._models.has_name(request.model):
            return self._known.get(request.model)
        return None

    def model_of(self, request: Named) -> ServedModel:
        """The model that the request names, also by an adapter's name, or the only one. Raises what is wrong."""
        adapter, name = self.of_request(request), request.model if request.HasField("model") else None
        if adapter is None:
            return self._models.find_by_name(name)
        model = self._models.find_by_name(adapter.model)
        if name not in (None, adapter.name) and self._models.find_by_name(name) is not model:
            raise InvalidArgument("lora", f"{adapter.name} is an adapter of {adapter.model}, and not of {name}")
        return model


def _missing(field: str, name: str) -> NotFound:
    return NotFound(f"{field}: no adapter {name[:64]!r} here", resource="adapter", name=name)
