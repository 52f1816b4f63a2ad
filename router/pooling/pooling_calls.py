"""What a client's call for vectors or scores comes to: checked, tokenized, and spread over workers."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from octavo.net.security.api_keys import salt_of
from octavo.net.security.authorizer import Authorizer
from octavo.pooling import judges, params, vectors
from octavo.pooling.params import PoolingParams
from octavo.request import validation
from octavo.request.errors import InvalidArgument, NoWorkers, ServingError
from octavo.request.limits import NO_QUOTA, TenantQuota
from octavo.wire.pooling import PromptVector
from router.fleet.model_registry import ModelRegistry, ServedModel
from router.pooling.pooling_gate import PoolingGate
from router.pooling.prompt_queue import VectorCall
from router.pooling.vector_dispatcher import VectorDispatcher

T = TypeVar("T")

LARGE = 8192  # characters: a tokenizer takes about as long for so many as a step does
MARGIN_SHARE, MAX_MARGIN_S = 0.1, 0.1  # a call ends so much earlier than its client gives up
PromptInput = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class VectorAnswer:
    """The vectors of a call, in the order of its prompts."""

    model: str
    vectors: list[PromptVector]
    num_tokens: int

    @property
    def cached_tokens(self) -> int:
        return sum(vector.cached_tokens for vector in self.vectors)


@dataclass(frozen=True, slots=True)
class ScoreAnswer:
    """The scores of a call, in the order of its pairs."""

    model: str
    scores: list[float]
    num_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedScores:
    """What a client asks of pairs of texts. The names are those of its fields, for errors."""

    left: Sequence[str]
    right: Sequence[str]
    method: str = ""
    instruction: str = ""
    left_field: str = "left"
    right_field: str = "right"


class PoolingCalls:
    """Lives on the event loop. Raises what is wrong with a call before any worker hears of it."""

    def __init__(
        self,
        models: ModelRegistry,
        dispatcher: VectorDispatcher,
        gate: PoolingGate,
        authorizer: Authorizer,
        quota: TenantQuota = NO_QUOTA,
        on_refusal: Callable[[ServingError, str], None] = lambda error, tenant: None,
        *,
        wait_for_workers: bool = False,
    ) -> None:
        self.gate = gate
        self.dispatcher = dispatcher
        self._models = models
        self._authorizer = authorizer
        self._quota = quota
        self._on_refusal = on_refusal
        self._wait_for_workers = wait_for_workers

    def find_model(self, name: str | None) -> ServedModel:
        """The model of that name, or the only one. Raises NotFound, InvalidArgument or NoWorkers."""
        with self._counting_refusals():
            model = self._models.find_by_name(name)
            if not model.workers and not self._wait_for_workers:
                raise NoWorkers(f"no worker serves {model.name} now: retry, or start one", retry_after_ms=500)
            return model

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        """Counts what ends a call before it is under way."""
        try:
            yield
        except ServingError as error:
            self._on_refusal(error, self._authorizer.current_tenant())
            raise

    async def embed(
        self,
        model: ServedModel,
        inputs: Sequence[PromptInput],
        asked: PoolingParams,
        remaining_s: float | None,
        field: str = "inputs",
    ) -> VectorAnswer:
        """A vector of each input; `field` is the client's name for the list."""
        with self._counting_refusals():
            params.check_call(len(inputs), field)
            made = (encode(model, each, f"{field}[{i}]") for i, each in enumerate(inputs))
            prompts = await aside(inputs, lambda: counted(made, field))
        found = await self._vectors(model, prompts, asked, remaining_s, field)
        return VectorAnswer(model.name, found, sum(map(len, prompts)))

    async def score(self, model: ServedModel, asked: AskedScores, remaining_s: float | None) -> ScoreAnswer:
        """A score for each pair; one text on the left is compared with each on the right."""
        with self._counting_refusals():
            pairs = checked_pairs(asked)
            method = judges.chosen_method(asked.method, model.pooling.judge)
            if len(asked.instruction.encode()) > params.MAX_INSTRUCTION_BYTES:
                raise InvalidArgument("instruction", f"give at most {params.MAX_INSTRUCTION_BYTES} bytes")
            if method == judges.COSINE and asked.instruction:
                raise InvalidArgument("instruction", "says nothing to cosine: write it into the text")
            check_texts(model, asked)
        if method == judges.COSINE:
            return await self._compare(model, asked, pairs, remaining_s)
        with self._counting_refusals():
            texts = [text for pair in pairs for text in pair]
            wanted = params.logits_of(judges.words(method, model.tokenizer))
            made = (judges.judge_prompt(method, model.tokenizer, *pair, asked.instruction) for pair in pairs)
            prompts = await aside(texts, lambda: counted(made, asked.right_field))
        found = await self._vectors(model, prompts, wanted, remaining_s, asked.right_field)
        scores = [vectors.likelihood(*vector.numbers) for vector in found]
        cached = sum(vector.cached_tokens for vector in found)
        return ScoreAnswer(model.name, scores, sum(map(len, prompts)), cached)

    async def _compare(
        self, model: ServedModel, asked: AskedScores, pairs: Sequence[tuple[str, str]], remaining_s: float | None
    ) -> ScoreAnswer:
        """Cosines. Each text is computed once, however many pairs it is in."""
        places = {text: place for place, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
        made = (encode(model, text, asked.right_field) for text in places)
        with self._counting_refusals():
            prompts = await aside(list(places), lambda: counted(made, asked.right_field))
        found = await self._vectors(model, prompts, model.pooling.resolved(), remaining_s, asked.right_field)
        placed = [(places[one], places[other]) for one, other in pairs]
        scores = await asyncio.to_thread(lambda: vectors.cosines([vector.numbers for vector in found], placed))
        cached = sum(vector.cached_tokens for vector in found)
        return ScoreAnswer(model.name, scores, sum(map(len, prompts)), cached)

    async def _vectors(
        self,
        model: ServedModel,
        prompts: Sequence[list[int]],
        asked: PoolingParams,
        remaining_s: float | None,
        field: str,
    ) -> list[PromptVector]:
        num_tokens, tenant = sum(map(len, prompts)), self._authorizer.current_tenant()
        with self._counting_refusals():
            for i, prompt in enumerate(prompts):
                name = f"{field}[{i}]"
                validation.validate_prompt(
                    prompt, vocab_size=model.vocab_size, context_tokens=model.context_tokens, field=name
                )
        ends_at = None
        if remaining_s is not None:
            ends_at = time.monotonic() + remaining_s - min(MAX_MARGIN_S, MARGIN_SHARE * remaining_s)
        call = VectorCall(model, asked, tenant, salt_of(tenant), ends_at)
        quota = self._authorizer.current_quota(self._quota)
        with ExitStack() as under_way:
            with self._counting_refusals():
                under_way.enter_context(self.gate.admit(tenant, quota, len(prompts), num_tokens))
            return await self.dispatcher.vectors(call, prompts)


def encode(model: ServedModel, given: PromptInput, field: str) -> list[int]:
    """The tokens of one input. Raises InvalidArgument or NoTokenizer."""
    if not isinstance(given, str):
        return list(given)
    text = validation.validate_text(given, field, context_tokens=model.context_tokens)
    return model.tokenizer.encode_whole(text)


def counted(made: Iterable[list[int]], field: str) -> list[list[int]]:
    """The prompts, of which no more are made once they are too long together. Raises InvalidArgument then."""
    prompts, num_tokens = list[list[int]](), 0
    for prompt in made:
        num_tokens += len(prompt)
        params.check_tokens(num_tokens, field)
        prompts.append(prompt)
    return prompts


def checked_pairs(asked: AskedScores) -> list[tuple[str, str]]:
    left, right = list(asked.left), list(asked.right)
    params.check_call(len(right), asked.right_field)
    if len(left) not in (1, len(right)):
        raise InvalidArgument(asked.left_field, f"{len(left)} texts for {len(right)}; give one, or as many")
    return list(zip(left * len(right) if len(left) == 1 else left, right, strict=True))


def check_texts(model: ServedModel, asked: AskedScores) -> None:
    """Raises InvalidArgument for a text that cannot be a part of a prompt. Each is looked at once."""
    for place, text in enumerate(asked.left):
        name = asked.left_field if len(asked.left) == 1 else f"{asked.left_field}[{place}]"
        validation.validate_text(text, name, context_tokens=model.context_tokens)
    for place, text in enumerate(asked.right):
        validation.validate_text(text, f"{asked.right_field}[{place}]", context_tokens=model.context_tokens)


async def aside(texts: Sequence[Sized], work: Callable[[], T]) -> T:
    """The result of `work` on these inputs. Much work runs in a thread, so that no stream has to wait for it."""
    return await asyncio.to_thread(work) if sum(map(len, texts)) > LARGE else work()
