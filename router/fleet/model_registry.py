"""The models this router serves, as their workers described them, and the tokenizers of those models."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from octavo.model_files.lora_support import LoraSupport
from octavo.pictures.support import NO_PICTURES, PictureSupport
from octavo.pooling.params import ModelPooling
from octavo.request.errors import InvalidArgument, NotFound, NoWorkers
from octavo.request.ids import Incarnation
from octavo.request.record import Record, WorkerRole
from octavo.request.sampling import SamplingParams
from octavo.store.calls import WorkerLimits
from octavo.text.encoded_prompt import NO_ENCODER, EncoderSupport
from octavo.text.stop import TextStream
from octavo.text.tokenizers.tokenizer import AnyTokenizer, Tokenizer, open_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a worker says of itself in its answer to Hello. None of it changes while the worker process lives."""

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
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # by field of SamplingParams
    max_sequence_blocks: int = 0  # how many blocks suffice for one branch, however long it is; 0: no number does
    role: WorkerRole = WorkerRole.BOTH
    numerics: str = ""  # its class of numerics; empty: it says nothing of it
    pooling: ModelPooling = field(default_factory=ModelPooling)  # what it can be asked of hidden states
    lora_support: LoraSupport = field(default_factory=LoraSupport)  # which low-rank adapters it takes
    pictures: PictureSupport = NO_PICTURES  # which pictures prompts may show
    encoder: EncoderSupport = NO_ENCODER  # how prompts are made, if the model has an encoder

    @property
    def limits(self) -> WorkerLimits:
        """What bounds the sequences that the worker can hold."""
        return WorkerLimits(
            self.model,
            self.fingerprint,
            self.context_tokens,
            self.block_size,
            self.num_blocks,
            self.max_sequence_blocks,
            self.max_batch_sequences,
        )


@dataclass(slots=True, eq=False)
class ServedModel:
    """The description of one served model, taken from its first worker.

    A later worker must agree in the fields that `find_difference` compares. When no worker is left, a worker that
    differs brings a new description.
    """

    name: str
    fingerprint: str
    layout: str
    block_size: int
    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: AnyTokenizer
    sampling_defaults: Mapping[str, float]  # what the model recommends for fields that a request leaves out
    workers: set[Incarnation] = field(default_factory=set)
    pooling: ModelPooling = field(default_factory=ModelPooling)
    lora_supports: dict[Incarnation, LoraSupport] = field(default_factory=dict)  # which adapters each worker takes
    picture_supports: dict[Incarnation, PictureSupport] = field(default_factory=dict)  # which pictures each takes
    described_pictures: PictureSupport = NO_PICTURES  # which it took when it was described
    encoder: EncoderSupport = NO_ENCODER  # how prompts are made, if it has an encoder

    @property
    def pictures(self) -> PictureSupport:
        """Which pictures its prompts may show: those that some worker takes."""
        return min(self.picture_supports.values(), key=lambda each: bool(each.refusal), default=self.described_pictures)

    @property
    def first_time(self) -> int:
        """The token of the time 0 in outputs with times; 0 if it has not one for each time."""
        speech = self.encoder.speech
        if speech is None or speech.first_time + self.pictures.num_positions >= self.vocab_size:
            return 0
        return speech.first_time

    def text_stream(self, params: SamplingParams) -> TextStream:
        """Makes the text of one branch, from the branch's first token on.

        What a model writes down begins without the blank that its first word has, and shows no tokens of times.
        """
        detokenizer, speech = self.tokenizer.detokenizer(params.skip_special_tokens), self.encoder.speech
        if speech is None:
            return TextStream.of_branch(detokenizer, params, self.eos_token_ids)
        times = range(speech.first_time, self.vocab_size) if params.skip_special_tokens else ()
        return TextStream.of_branch(detokenizer.without_blank(), params, self.eos_token_ids, times)


class ModelRegistry:
    """The served models by name, with their workers. `tokenizer` counts instead of those that the workers name."""

    def __init__(self, aliases: Mapping[str, str] | None = None, tokenizer: Tokenizer | None = None) -> None:
        self._aliases = dict(aliases or {})
        self._tokenizer = tokenizer
        self._models: dict[str, ServedModel] = {}
        self._loading = asyncio.Lock()
        self.served_lately: Callable[[str], bool] = lambda name: False  # by any worker that any router has met

    async def add_worker(self, facts: WorkerFacts) -> str:
        """Counts the worker among the workers of its model. Returns why that is impossible, or an empty string."""
        if refusal := await self.add_model(facts):
            return refusal
        if difference := find_difference(self._models[facts.model], facts):
            return difference
        self._models[facts.model].workers.add(facts.incarnation)
        self._models[facts.model].lora_supports[facts.incarnation] = facts.lora_support
        self._models[facts.model].picture_supports[facts.incarnation] = facts.pictures
        return ""

    async def add_model(self, facts: WorkerFacts) -> str:
        """Registers the model of such a worker, living or not. Returns why that is impossible, or an empty string."""
        if meant := self._aliases.get(facts.model):
            return f"its model has the name {facts.model}, which --model-aliases gives to {meant}: rename one of them"
        async with self._loading:
            model = self._models.get(facts.model)
            if model is None or (not model.workers and find_difference(model, facts)):
                if self._tokenizer is not None and self._tokenizer.vocab_size > facts.vocab_size:
                    tokens = f"{self._tokenizer.vocab_size} tokens, model {facts.model} has {facts.vocab_size}"
                    return f"the tokenizer of --tokenizer has {tokens}: give the model's own"
                try:
                    tokenizer: AnyTokenizer | None = self._tokenizer
                    if tokenizer is None:
                        tokenizer = await asyncio.to_thread(open_tokenizer, facts.tokenizer)
                except Exception as error:  # an unreadable tokenizer must not take the router down
                    log.error("worker %s: tokenizer %s: %s", facts.worker_id, facts.tokenizer, error)
                    return f"its tokenizer cannot be loaded here (--tokenizer names one that can): {error}"
                self._models[facts.model] = ServedModel(
                    facts.model,
                    facts.fingerprint,
                    facts.layout,
                    facts.block_size,
                    facts.context_tokens,
                    facts.vocab_size,
                    facts.eos_token_ids,
                    tokenizer,
                    facts.sampling_defaults,
                    pooling=facts.pooling,
                    described_pictures=facts.pictures,
                    encoder=facts.encoder,
                )
        return ""

    def has_name(self, name: str) -> bool:
        """Whether a model or an alias has this name."""
        return name in self._models or name in self._aliases

    def has(self, name: str) -> bool:
        """Whether the model of that name is known here."""
        return name in self._models

    def remove_worker(self, incarnation: Incarnation) -> None:
        """The worker serves no model any more. An unknown worker changes nothing."""
        for model in self._models.values():
            model.workers.discard(incarnation)
            model.lora_supports.pop(incarnation, None)
            model.picture_supports.pop(incarnation, None)

    def find_by_name(self, name: str | None) -> ServedModel:
        """The model of that name or alias, or the only model if no name is given.

        Raises NoWorkers if this router has not met any worker, or none of a model that was served not long ago;
        otherwise what is wrong with the request.
        """
        if not self._models:
            raise NoWorkers("no worker has been met yet: retry, or start one", retry_after_ms=500)
        if name is None:
            if len(self._models) > 1:
                raise InvalidArgument("model", f"name one of {', '.join(sorted(self._models))}")
            return next(iter(self._models.values()))
        meant = self._aliases.get(name, name)
        if meant not in self._models and self.served_lately(meant):
            raise NoWorkers(f"no worker of {meant} has been met yet: retry, or start one", retry_after_ms=500)
        if meant not in self._models:
            shown = repr(name[:64]) if meant == name else f"{name[:64]!r} (an alias of {meant!r})"
            there_is = ", ".join(sorted(self._models))
            raise NotFound(f"model: no model {shown} here; there is {there_is}", resource="model", name=name)
        return self._models[meant]

    def aliases_of(self, model: ServedModel) -> list[str]:
        """The further names of a model, in the order of the alphabet."""
        return sorted(alias for alias, meant in self._aliases.items() if meant == model.name)

    def find_for_record(self, record: Record) -> ServedModel | None:
        """The model that a request was accepted for. If none has that layout: a model with the same weights."""
        same = [model for model in self._models.values() if model.fingerprint == record.model]
        return next((model for model in same if model.layout == record.layout), same[0] if same else None)

    def find_by_fingerprint(self, fingerprint: str) -> ServedModel | None:
        return next((model for model in self._models.values() if model.fingerprint == fingerprint), None)

    def list_models(self) -> list[ServedModel]:
        """All models that any worker has ever had, by name."""
        return sorted(self._models.values(), key=lambda model: model.name)


def find_difference(model: ServedModel, facts: WorkerFacts) -> str:
    """Why the worker cannot serve that model beside the model's other workers. Empty if it can."""
    for name in ("fingerprint", "layout", "block_size", "context_tokens", "vocab_size", "sampling_defaults", "encoder"):
        known, described = getattr(model, name), getattr(facts, name)
        if known != described:
            return f"{name} {described} differs from {known} of model {facts.model}"
    return ""
