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


PACKED = ({"dtype": "bfloat16", "quantization": "none"}, {"quantization": "q8"}, {"quantization": "q4"})
TYPES = ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "float16"})
CACHES = ({}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8_e4m3"})
SHAPES = ((2, 1), (3, 1), (4, 1), (1, 2), (2, 2))  # ranks and stages


@pytest.mark.parametrize("kind", [*random_models.MIXTURES, *random_models.GPTS])
@pytest.mark.parametrize("seed", some(range(1, 6), [1]))
def test_ranks_compute_the_bits_of_one_process(kind, seed, pool, all_logits, tmp_path):
    draw = random.Random(f"{kind} {seed}")
    mixture = kind in random_models.MIXTURES
    config = (random_models.random_mixture if mixture else random_models.random_gpt)(draw, kind)
    model = random_models.save_random(config, tmp_path, seed)
    options = {**SIZES, **draw.choice(PACKED if mixture else TYPES), **draw.choice(CACHES)}
    options["threads"] = draw.randint(1, 2)
    alone = load_runner(str(model), **options)
    told = alone.info.numerics, alone.info.fingerprint
    *logits, tokens = computed(alone, all_logits, model)
    with pool.group(model, *draw.choice(SHAPES), **options) as runner:
        assert (runner.info.numerics, runner.info.fingerprint) == told
        *shared, said = computed(runner, all_logits, model)
        assert [torch.equal(one, other) for one, other in zip(logits, shared, strict=True)] == [True, True]
        assert said == tokens
