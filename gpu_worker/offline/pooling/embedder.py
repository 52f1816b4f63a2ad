"""Brings prompts to an LLM's engine whose vectors are wanted, and steps until all are there."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from gpu_worker.offline.offline_engine import InterruptGuard, OfflineEngine
from gpu_worker.offline.pooling.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    OfflinePoolingParams,
    ScoringOutput,
    ScoringRequestOutput,
)
from gpu_worker.offline.prompts import OfflinePrompt
from gpu_worker.pooling.pooled_sequences import pooled_sequence
from gpu_worker.pooling.vectors import vector_of
from gpu_worker.scheduling.state.pooling import PoolingEnd
from gpu_worker.scheduling.state.sequence import Sequence as ScheduledSequence
from gpu_worker.steps.runner import RunnerInfo
from octavo.pooling import judges
from octavo.pooling.params import PoolingParams, logits_of
from octavo.pooling.vectors import cosine, likelihood
from octavo.request import validation
from octavo.request.errors import Failure, InvalidArgument, ServingError, TooLarge
from octavo.text.tokenizers.tokenizer import AnyTokenizer


@dataclass(slots=True, eq=False)
class PooledPrompt:
    """One prompt, and the vector once it is there."""

    argument: str
    token_ids: list[int]
    params: PoolingParams
    salt: str = ""
    end: PoolingEnd | None = None

    def note_end(self, end: PoolingEnd) -> None:
        self.end = end

    @property
    def num_cached(self) -> int:
        return self.end.cached_tokens if self.end else 0

    def result(self) -> tuple[list[float], Failure | None]:
        """The vector, or the failure without one."""
        try:
            if self.end is None:
                raise RuntimeError(f"{self.argument}: the engine ended before its vector was there")
            return vector_of(self.end, self.params, len(self.token_ids)).tolist(), None
        except ServingError as error:
            return [], error.failure()


class Embedder:
    """Checks the prompts of a call, and runs them. Every prompt is checked before the first step."""

    def __init__(self, engine: OfflineEngine, info: RunnerInfo, tokenizer: AnyTokenizer) -> None:
        self._engine = engine
        self._info = info
        self._tokenizer = tokenizer

    def embed(
        self, prompts: Sequence[OfflinePrompt], asked: OfflinePoolingParams, bar: tqdm, guard: InterruptGuard
    ) -> list[EmbeddingRequestOutput]:
        params = self._info.pooling.resolved(asked.pooling or "", asked.normalize, asked.dimensions or 0)
        pooled = [PooledPrompt(each.argument, self._encode(each), params, each.salt) for each in prompts]
        self._run(pooled, bar, guard)
        outputs = []
        for number, prompt in enumerate(pooled):
            vector, failure = prompt.result()
            made = EmbeddingOutput(vector), prompt.token_ids, prompt.num_cached, failure
            outputs.append(EmbeddingRequestOutput(str(number), *made))
        return outputs

    def score(
        self, left: list[str], right: list[str], method: str, instruction: str, bar: tqdm, guard: InterruptGuard
    ) -> list[ScoringRequestOutput]:
        """The scores of pairs; one text on the left is compared with each on the right."""
        if len(left) not in (1, len(right)):
            raise InvalidArgument("data_1", f"{len(left)} texts for {len(right)}; give one, or as many")
        pairs = list(zip(left * len(right) if len(left) == 1 else left, right, strict=True))
        method = judges.chosen_method(method, self._info.pooling.judge)
        if method == judges.COSINE:
            return self._compare(pairs, bar, guard)
        params = logits_of(judges.words(method, self._tokenizer))
        pooled = [
            PooledPrompt(f"data_2[{i}]", judges.judge_prompt(method, self._tokenizer, *pair, instruction), params)
            for i, pair in enumerate(pairs)
        ]
        self._run(pooled, bar, guard)
        outputs = []
        for number, prompt in enumerate(pooled):
            logits, failure = prompt.result()
            score = math.nan if failure else likelihood(*logits)
            made = ScoringOutput(score), prompt.token_ids, prompt.num_cached, failure
            outputs.append(ScoringRequestOutput(str(number), *made))
        return outputs

    def _compare(
        self, pairs: Sequence[tuple[str, str]], bar: tqdm, guard: InterruptGuard
    ) -> list[ScoringRequestOutput]:
        """Each text once, however many pairs it is in."""
        params, prompts = self._info.pooling.resolved(), dict[str, PooledPrompt]()
        for i, pair in enumerate(pairs):
            for side, text in enumerate(pair, 1):
                if text not in prompts:
                    prompt = OfflinePrompt(f"data_{side}[{i}]", text)
                    prompts[text] = PooledPrompt(prompt.argument, self._encode(prompt), params)
        self._run(list(prompts.values()), bar, guard)
        outputs = []
        for number, (one, other) in enumerate(pairs):
            (a, failed), (b, also_failed) = prompts[one].result(), prompts[other].result()
            failure = failed or also_failed
            score = math.nan if failure else cosine(a, b)
            token_ids = [*prompts[one].token_ids, *prompts[other].token_ids]
            cached = prompts[one].num_cached + prompts[other].num_cached
            outputs.append(ScoringRequestOutput(str(number), ScoringOutput(score), token_ids, cached, failure))
        return outputs

    def _encode(self, prompt: OfflinePrompt) -> list[int]:
        if prompt.token_ids is not None:
            return list(prompt.token_ids)
        context = self._info.context_tokens
        text = validation.validate_text(prompt.text or "", prompt.argument, context_tokens=context, allow_empty=True)
        return self._tokenizer.encode_whole(text)

    def _run(self, prompts: Sequence[PooledPrompt], bar: tqdm, guard: InterruptGuard) -> None:
        bar.total = len(prompts)
        sequences = [
            pooled_sequence(each.token_ids, each.params, self._info, each.note_end, field=each.argument, salt=each.salt)
            for each in prompts
        ]
        try:
            self._step_until_ended(deque(zip(prompts, sequences, strict=True)), bar, guard)
        except BaseException:
            self._engine.start_anew()
            raise

    def _step_until_ended(
        self, waiting: deque[tuple[PooledPrompt, ScheduledSequence]], bar: tqdm, guard: InterruptGuard
    ) -> None:
        engine, under_way = self._engine, list[PooledPrompt]()
        while waiting or under_way:
            guard.deliver_interrupt()
            while waiting and engine.has_room:
                prompt, sequence = waiting.popleft()
                answer = engine.scheduler.admit(sequence)
                if answer.failure is not None:
                    raise TooLarge(f"{prompt.argument}: {answer.failure.message}")
                under_way.append(prompt)
            engine.step()
            left = [prompt for prompt in under_way if prompt.end is None]
            bar.update(len(under_way) - len(left))
            under_way = left
