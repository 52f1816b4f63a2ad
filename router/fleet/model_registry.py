"""The models this router serves: what their workers said of them, and their tokenizers."""

import asyncio
import logging
from dataclasses import dataclass, field

from octavo.errors import InvalidArgument, NotFound, NoWorkers
from octavo.ids import Incarnation
from octavo.record import Record
from octavo.sampling import SamplingParams
from octavo.text.byte_tokenizer import ByteTokenizer
from octavo.text.stop import TextStream
from octavo.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What does not change while a worker process lives."""

    worker_id: str
    incarnation: Incarnation
    model: str
    fingerprint: str
    layout: str
    block_size: int
    num_blocks: int
    context_tokens: int
    vocab_size: int
    tokenizer: str
    eos_token_ids: tuple[int, ...]
    max_batch_tokens: int
    max_batch_sequences: int
    device: str


@dataclass(slots=True, eq=False)
class ServedModel:
    """One model name: every worker that serves it has the same fingerprint and layout."""

    name: str
    fingerprint: str
    layout: str
    block_size: int
    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | ByteTokenizer
    workers: set[Incarnation] = field(default_factory=set)

    def text_stream(self, params: SamplingParams) -> TextStream:
        """The text of one branch, from its first token on."""
        return TextStream.of_branch(self.tokenizer.detokenizer(params.skip_special_tokens), params, self.eos_token_ids)


class ModelRegistry:
    """Known models by name. A worker whose model differs from the one known under its name is refused."""

    def __init__(self) -> None:
        self._models: dict[str, ServedModel] = {}
        self._loading = asyncio.Lock()

    async def meet(self, facts: WorkerFacts) -> str:
        """Takes a worker in; returns why not, or an empty string."""
        async with self._loading:
            model = self._models.get(facts.model)
            if model is None or (not model.workers and difference(model, facts)):
                try:
                    tokenizer = await asyncio.to_thread(load, facts.tokenizer)
                except Exception as error:  # an unreadable tokenizer must not take the router down
                    log.error("worker %s: tokenizer %s: %s", facts.worker_id, facts.tokenizer, error)
                    return f"its tokenizer cannot be loaded here: {error}"
                model = self._models[facts.model] = ServedModel(
                    facts.model,
                    facts.fingerprint,
                    facts.layout,
                    facts.block_size,
                    facts.context_tokens,
                    facts.vocab_size,
                    facts.eos_token_ids,
                    tokenizer,
                )
        if different := difference(model, facts):
            return different
        model.workers.add(facts.incarnation)
        return ""

    def leave(self, incarnation: Incarnation) -> None:
        for model in self._models.values():
            model.workers.discard(incarnation)

    def find(self, name: str | None) -> ServedModel:
        """The model of that name, or the only one there is."""
        if not self._models:
            raise NoWorkers("no worker has been met yet: retry, or start one", retry_after_ms=500)
        if name is None:
            if len(self._models) > 1:
                raise InvalidArgument("model", f"name one of {', '.join(sorted(self._models))}")
            return next(iter(self._models.values()))
        if name not in self._models:
            raise NotFound(f"model: no model {name[:64]!r} here; there is {', '.join(sorted(self._models))}")
        return self._models[name]

    def of(self, record: Record) -> ServedModel | None:
        """The model a request was accepted for; if no model here has its layout, one with the same weights."""
        same = [model for model in self._models.values() if model.fingerprint == record.model]
        return next((model for model in same if model.layout == record.layout), same[0] if same else None)

    def all(self) -> list[ServedModel]:
        return sorted(self._models.values(), key=lambda model: model.name)


def difference(model: ServedModel, facts: WorkerFacts) -> str:
    """What keeps the worker from serving that model beside its other workers; empty if nothing does."""
    for name in ("fingerprint", "layout", "block_size", "context_tokens", "vocab_size"):
        mine, theirs = getattr(model, name), getattr(facts, name)
        if mine != theirs:
            return f"{name} {theirs} differs from {mine} of model {facts.model}"
    return ""


def load(source: str) -> Tokenizer | ByteTokenizer:
    return load_tokenizer(source) if source else ByteTokenizer()
