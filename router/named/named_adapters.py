"""The low-rank adapters that operators have named, as the store has them, and which of them a request asks for.

What counts is the digest: a name may get other bytes at any time.
"""

import asyncio
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from octavo.model_files.lora_files import read_lora
from octavo.model_files.lora_support import LoraSupport, check_any
from octavo.request import limits
from octavo.request.errors import InvalidArgument, NotFound, StoreUnavailable, TooManyAdapters, Unimplemented
from octavo.store.base import Store
from router.fleet.model_registry import ModelRegistry, ServedModel
from router.named.named_entries import NamedEntries

log = logging.getLogger(__name__)

ROUND_S = 1.0
MAX_NAME = 64
MAX_LISTED = 16  # names in a message
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_NAME}}}")


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """It is kept in the store as JSON, by its name."""

    name: str
    model: str  # the name of the model that it is for
    digest: str  # of its numbers, and of how they are scaled
    source: str  # the folder, which every worker can read
    rank: int
    num_bytes: int

    def pack(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def parse(cls, packed: bytes) -> "NamedAdapter":
        """Raises ValueError, TypeError or KeyError if another program has written it."""
        return cls(**json.loads(packed))


class NamedAdapters:
    """What this router knows of them. It reads them anew every second."""

    def __init__(self, store: Store, models: ModelRegistry) -> None:
        self._store = store
        self._models = models
        self._entries = NamedEntries(store.adapters, NamedAdapter.parse, "adapter")
        self._one = asyncio.Lock()  # an adapter is read whole

    async def keep(self) -> None:
        """One round, with the pause after it."""
        try:
            await self.refresh()
        except StoreUnavailable:
            log.debug("the store does not answer: adapters are those known before")
        await asyncio.sleep(ROUND_S)

    async def refresh(self) -> None:
        """Reads what the store has. Raises StoreUnavailable."""
        await self._entries.refresh()

    def all(self) -> list[NamedAdapter]:
        """In the order of their names."""
        return sorted(self._entries.known.values(), key=lambda adapter: adapter.name)

    def find(self, name: str) -> NamedAdapter | None:
        return self._entries.known.get(name)

    async def add(self, name: str, source: str, model: str | None = None) -> NamedAdapter:
        """Reads the adapter in a folder of this machine, and names it. A name that is there gets this one.

        Raises BadModel, TooLarge or Unimplemented if no worker of the model takes it, as far as workers are known here;
        and InvalidArgument, NotFound, NoWorkers, TooManyAdapters or StoreUnavailable.
        """
        if not _NAME.fullmatch(name):
            raise InvalidArgument("name", f"1 to {MAX_NAME} letters, digits, dots, dashes and underscores")
        base = self._models.find_by_name(model)
        supports = list(base.lora_supports.values())
        if supports and all(support.refusal for support in supports):
            raise Unimplemented(f"model: {base.name} takes no adapters: {supports[0].refusal}")
        if self._models.has_name(name):
            raise InvalidArgument("name", f"{name} is the name of a model: choose another one")
        if not source.startswith("/") or len(source) > limits.MAX_ADAPTER_SOURCE:
            what = f"must be an absolute path of at most {limits.MAX_ADAPTER_SOURCE} characters"
            raise InvalidArgument("source", f"{what}, which this router and all workers can read")
        async with self._one:
            adapter = await asyncio.to_thread(_read, name, base.name, source, supports)
            if not await self._store.put_adapter(name, adapter.pack(), limits.MAX_ADAPTERS):
                raise TooManyAdapters(f"there are {limits.MAX_ADAPTERS} adapters: remove one")
        await self.refresh()
        log.info("adapter %s of %s is %s, from %s", name, base.name, adapter.digest, source)
        return adapter

    async def remove(self, name: str, field: str = "name") -> None:
        """`field` is what the caller calls the name. Raises NotFound, StoreUnavailable."""
        if not await self._store.drop_adapter(name):
            raise self._missing(field, name)
        log.info("adapter %s is removed", name)
        await self.refresh()

    async def look_up(self, model: str | None, lora: str | None = None) -> None:
        """Reads the store once more if a name is not known here: it may be a moment old. Raises StoreUnavailable."""
        name = lora if lora is not None else model
        if name is not None and name not in self._entries.known and not self._models.has_name(name):
            await self.refresh()

    def asked(self, model: str | None, lora: str | None = None) -> NamedAdapter | None:
        """The adapter that a request asks for, by `lora` or by the name of its model. Raises NotFound."""
        if lora is not None:
            if lora not in self._entries.known:
                raise self._missing("lora", lora)
            return self._entries.known[lora]
        return self._entries.known.get(model) if model is not None and not self._models.has_name(model) else None

    def model_of(self, model: str | None, lora: str | None = None) -> ServedModel:
        """The model that a request names, also by an adapter's name, or the only one. Raises what is wrong."""
        adapter = self.asked(model, lora)
        try:
            base = self._models.find_by_name(adapter.model if adapter else model)
        except NotFound as error:
            if adapter is not None:
                what = f"{adapter.name} is an adapter of {adapter.model}, which is not served here"
                raise NotFound(f"model: {what}", resource="model", name=adapter.name) from None
            raise NotFound(
                f"{error.message}{self._listed(', and of adapters ')}", resource="model", name=model or ""
            ) from None
        if adapter is None:
            return base
        if model not in (None, adapter.name) and self._models.find_by_name(model) is not base:
            raise InvalidArgument("lora", f"{adapter.name} is an adapter of {adapter.model}, and not of {model}")
        return base

    def names_of(self, model: ServedModel, digest: str) -> list[str]:
        """The names that an adapter of the model has now."""
        return [adapter.name for adapter in self.all() if (adapter.model, adapter.digest) == (model.name, digest)]

    def _missing(self, field: str, name: str) -> NotFound:
        listed = self._listed("; there is ")
        return NotFound(f"{field}: no adapter {name[:64]!r} here{listed}", resource="adapter", name=name)

    def _listed(self, begin: str) -> str:
        """Some of the names that requests can use now, after these words; empty: there is none."""
        names = [adapter.name for adapter in self.all() if self._models.has(adapter.model)]
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        return f"{begin}{', '.join(names[:MAX_LISTED])}{more}" if names else ""


def _read(name: str, model: str, source: str, supports: Sequence[LoraSupport]) -> NamedAdapter:
    """Without the adapter's numbers: they leave memory before the next one is read."""
    files = read_lora(Path(source))
    check_any(files, supports)
    return NamedAdapter(name, model, files.digest, source, files.rank, files.num_bytes)
