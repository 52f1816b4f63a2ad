"""Ranks beside one process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from guard.processes import lasting
from rank_pool import RankPool

from gpu_worker import LLM, SamplingParams
from gpu_worker.running.loading import load_runner
from gpu_worker.running.model_runner import ModelRunner

TOKENS = [(7 * i + 3) % 128 for i in range(50)]
SIZES: dict[str, Any] = {
    "threads": 1,
    "block_size": 8,
    "kv_cache_bytes": 1 << 21,
    "swap_bytes": 0,
    "max_batch_tokens": 96,
    "max_batch_sequences": 16,
    "packed_cache": "off",
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(tmp_path_factory.mktemp("ranks")) as ranks, lasting(lambda: ranks.pids):
        yield ranks


def computed(runner: ModelRunner, all_logits: Callable[..., torch.Tensor], model: Path) -> list[Any]:
    """Logits of one piece and of several, and greedy tokens of sequences in one batch with drawn ones."""
    logits = [all_logits(runner, TOKENS), all_logits(runner, TOKENS, (1, 17, 18))]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=12, logprobs=2, ignore_eos=True) for i in range(4)]
    with LLM(str(model), runner=runner, max_batch_tokens=24, max_batch_sequences=8) as llm:
        prompts = [TOKENS[: 5 + 9 * i] for i in range(4)]
        answers = llm.generate(prompts, params, use_tqdm=False)
        return [*logits, [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in answers]]


@pytest.fixture
def check_same(pool: RankPool, all_logits: Callable[..., torch.Tensor]) -> Callable[..., None]:
    """Checks that ranks and stages compute what one process computes, and name the same numerics."""

    def check(model: Path, ranks: int, stages: int, **options: Any) -> None:
        given = {**SIZES, **options}
        alone = load_runner(str(model), **given)
        told = alone.info.numerics, alone.info.fingerprint
        *logits, tokens = computed(alone, all_logits, model)
        with pool.group(model, ranks, stages, **given) as runner:
            assert (runner.info.numerics, runner.info.fingerprint) == told
            *shared, said = computed(runner, all_logits, model)
            assert [torch.equal(one, other) for one, other in zip(logits, shared, strict=True)] == [True, True]
            assert said == tokens

    return check


@pytest.fixture(scope="session")
def sizes() -> dict[str, Any]:
    return SIZES
