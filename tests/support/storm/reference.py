"""What a real model says to each request of a list, as one process says it that nobody disturbs.

    python -m storm.reference FOLDER FILE SEED

makes a small model in FOLDER, and writes a list of requests of all kinds with their answers to FILE. The streams of a
storm ask for what is in the list, and are held against it.
"""

import json
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

from live.oracle import Expected, Oracle, cut
from live.traffic import varied_request
from storm.stream_log import params_of, sampling_of

from octavo.client import FinishReason, SamplingParams

FILE = "reference.json"  # in the folder of a run
NUM_REQUESTS = 240
BEAMS = 0.1  # the share of beam searches, which journal nothing before their end
LENGTHS = [30, 80, 80, 120, 120, 200, 500]  # of outputs, in tokens
BYTES = 256  # tokens of the model that are no end
Request = tuple[list[int], SamplingParams]


class RecordedAnswers:
    """What a file says: it has the methods of an Oracle that streams and their checker need."""

    def __init__(self, file: Path) -> None:
        self._requests: list[Request] = []
        self._answers: dict[str, list[Expected]] = {}
        self._competing: dict[str, list[Expected]] = {}  # all branches of requests that return some of them
        for prompt, params, answer, competing in json.loads(file.read_text(encoding="utf-8")):
            sampling = sampling_of(params)
            self._requests.append((prompt, sampling))
            key = _key(prompt, sampling)
            self._answers[key] = _read_outputs(answer)
            self._competing[key] = _read_outputs(competing)

    def draw(self, rng: random.Random) -> Request:
        """One of the requests. None has stop strings."""
        return rng.choice(self._requests)

    def outputs(self, prompt: Sequence[int], params: SamplingParams) -> list[Expected]:
        """Of a request of the list, which may have got stop strings if its branches do not compete."""
        return [_until_stop(output, params) for output in self._answers[_key(prompt, params)]]

    def choices(
        self, prompt: Sequence[int], params: SamplingParams, *, cancelled: bool = False
    ) -> list[list[Expected]]:
        """One, but of a cancelled request whose branches compete: those have whatever scores they had got."""
        competing = self._competing[_key(prompt, params)]
        if cancelled and competing:
            return [list(chosen) for chosen in permutations(competing, params.n)]
        return [self.outputs(prompt, params)]


Answers = Oracle | RecordedAnswers


def _key(prompt: Sequence[int], params: SamplingParams) -> str:
    return json.dumps([list(prompt), params_of(replace(params, stop=()))])


def _read_outputs(told: Iterable[Any]) -> list[Expected]:
    return [Expected(tuple(tokens), text, FinishReason(finish)) for tokens, text, finish in told]


def _until_stop(output: Expected, params: SamplingParams) -> Expected:
    found = cut(output.token_ids, params)
    return found if found.finish_reason is FinishReason.STOP else output


def draw_request(rng: random.Random, oracle: Oracle, number: int) -> Request:
    """A beam search, or one of the kind of the number."""
    length = rng.choice(LENGTHS)
    prompt, sampling = varied_request(rng, oracle, number, length)
    if rng.random() < BEAMS:
        sampling = SamplingParams(beam_width=3, n=2, max_tokens=min(length, 120))
    return prompt, sampling


def model_requests(rng: random.Random) -> list[Request]:
    """Of all kinds, of the tokens that the model has."""
    drawn = [draw_request(rng, Oracle("witness"), number) for number in range(NUM_REQUESTS)]
    return [([token % BYTES for token in prompt], replace(sampling, stop=())) for prompt, sampling in drawn]


def all_branches(sampling: SamplingParams) -> SamplingParams:
    """The parameters with which all branches are returned that compete with these: each draws as it does there."""
    return replace(sampling, n=sampling.best_of)


def answers_of(model: Path, requests: Sequence[Request]) -> list[list[Expected]]:
    """Of one process."""
    from gpu_worker import LLM  # torch
    from gpu_worker import SamplingParams as OfflineParams

    with LLM(str(model), threads=1, kv_cache_bytes="64MiB", prefix_caching=False, speculation="off") as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        found = llm.generate(prompts, [OfflineParams.of(sampling) for _, sampling in requests], use_tqdm=False)
    return [
        [
            Expected(tuple(output.token_ids), output.text, FinishReason[str(output.finish_reason).upper()])
            for output in each.outputs
        ]
        for each in found
    ]


def competes(sampling: SamplingParams) -> bool:
    """Whether fewer branches are returned than drawn."""
    return sampling.best_of > sampling.n and not sampling.beam_width


def _told(outputs: Iterable[Expected]) -> list[Any]:
    return [(each.token_ids, each.text, each.finish_reason) for each in outputs]


def main() -> None:
    from folder_llama import folder_llama

    model, out, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    folder_llama(model)
    requests = model_requests(random.Random(seed))
    competing = [(prompt, all_branches(sampling)) for prompt, sampling in requests if competes(sampling)]
    found = answers_of(model, [*requests, *competing])
    branches = iter(found[len(requests) :])
    told = [
        (prompt, params_of(sampling), _told(answer), _told(next(branches)) if competes(sampling) else [])
        for (prompt, sampling), answer in zip(requests, found, strict=False)
    ]
    out.write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main()
