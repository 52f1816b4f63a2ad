"""Whatever a model is made of: ranks compute the logits of one process, to the bit, and leave the same blocks."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import random_models
import torch
from effort import some
from guard.processes import lasting
from rank_pool import RankPool
from transformers_types import MIXTURES

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
GPTS = [
    *("gpt2", "gpt2-scaled-by-layer", "gpt2-relu", "gptj", "codegen", "gpt-neo", "bloom", "bloom-normed-residual"),
    *("falcon-7b", "falcon-40b", "falcon-11b", "falcon-rw", "falcon-sequential", "mpt"),
]


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


def check_same(
    pool: RankPool, all_logits: Callable[..., torch.Tensor], model: Path, ranks: int, stages: int = 1, **options: Any
) -> None:
    given = {**SIZES, **options}
    alone = load_runner(str(model), **given)
    numerics = alone.info.numerics
    *logits, tokens = computed(alone, all_logits, model)
    with pool.group(model, ranks, stages, **given) as runner:
        assert runner.info.numerics == numerics
        assert runner.info.fingerprint == alone.info.fingerprint
        *shared, said = computed(runner, all_logits, model)
        assert [torch.equal(one, other) for one, other in zip(logits, shared, strict=True)] == [True, True]
        assert said == tokens


@pytest.mark.parametrize("name", some(MIXTURES, list(MIXTURES)[::3]))
def test_a_mixture_of_experts(name, tiny, pool, all_logits):
    check_same(pool, all_logits, tiny(name).directory, 2, dtype="float32")


@pytest.mark.parametrize("name", some(GPTS, GPTS[::3]))
def test_a_model_like_gpt(name, tiny, pool, all_logits):
    check_same(pool, all_logits, tiny(name).directory, 2, dtype="float32")


PACKED = ({"dtype": "bfloat16", "quantization": "none"}, {"quantization": "q8"}, {"quantization": "q4"})
CACHES = ({}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8_e4m3"})
SHAPES = ((2, 1), (3, 1), (4, 1), (1, 2), (2, 2))  # ranks and stages


@pytest.mark.parametrize("kind", random_models.MIXTURES)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
def test_random_mixtures(kind, seed, pool, all_logits, tmp_path):
    draw = random.Random(f"{kind} {seed}")
    model = random_models.save_random(random_models.random_mixture(draw, kind), tmp_path, seed)
    options = {**draw.choice(PACKED), **draw.choice(CACHES), "threads": draw.randint(1, 2)}
    check_same(pool, all_logits, model, *draw.choice(SHAPES), **options)


@pytest.mark.parametrize("kind", random_models.GPTS)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
def test_random_models_like_gpt(kind, seed, pool, all_logits, tmp_path):
    draw = random.Random(f"{kind} {seed}")
    model = random_models.save_random(random_models.random_gpt(draw, kind), tmp_path, seed)
    dtype = draw.choice(("float32", "bfloat16", "float16"))
    options = {"dtype": dtype, **draw.choice(CACHES), "threads": draw.randint(1, 2)}
    check_same(pool, all_logits, model, *draw.choice(SHAPES), **options)
