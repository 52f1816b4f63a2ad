"""Whatever a model is made of: ranks compute the logits of one process, to the bit, and leave the same blocks."""

import random

import pytest
import random_models
from effort import some

PACKED = ({"dtype": "bfloat16", "quantization": "none"}, {"quantization": "q8"}, {"quantization": "q4"})
TYPES = ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "float16"})
CACHES = ({}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8_e4m3"})
SHAPES = ((2, 1), (3, 1), (4, 1), (1, 2), (2, 2))  # ranks and stages


@pytest.mark.parametrize("kind", [*random_models.MIXTURES, *random_models.DENSE, *random_models.GPTS])
@pytest.mark.parametrize("seed", some(range(1, 6), [1]))
def test_ranks_compute_the_bits_of_one_process(kind, seed, check_same, tmp_path):
    draw = random.Random(f"{kind} {seed}")
    packed = kind not in random_models.GPTS
    makers = {random_models.MIXTURES: random_models.random_mixture, random_models.DENSE: random_models.random_dense}
    make = next((make for kinds, make in makers.items() if kind in kinds), random_models.random_gpt)
    config = make(draw, kind)
    model = random_models.save_random(config, tmp_path, seed)
    options = {**draw.choice(PACKED if packed else TYPES), **draw.choice(CACHES), "threads": draw.randint(1, 2)}
    check_same(model, *draw.choice(SHAPES), **options)
