"""Mixtures of experts in GGUF files of any type: ranks compute the logits of one process on the bits of the file.

Each layer's experts are one tensor there, of which a rank multiplies with some rows of each expert.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from effort import some
from gguf_converter import convert
from transformers_types import MIXTURES

from gpu_worker import LLM, SamplingParams

# K quants have blocks of 256 columns.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 64}
FIELDS = {
    "gpt_oss": {"swiglu_limit": 7.0},
    "qwen3_moe": {"norm_topk_prob": True},
    "dots1": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
}
EXPERTS = ("moe_intermediate_size", "shared_expert_intermediate_size")
# A model, the type of its matrices, ranks, stages, what matrices are packed to
USUAL = [
    ("qwen3_moe", "Q4_K", 4, 1, "auto"),
    ("gpt_oss", "MXFP4", 1, 2, "auto"),
]
CASES = [
    *USUAL,
    ("mixtral", "Q6_K", 2, 1, "auto-a8"),
    ("qwen2_moe", "IQ4_XS", 2, 2, "none"),
    ("qwen3_moe", "Q3_K", 2, 2, "auto"),
    ("qwen3_moe", "Q8_0", 1, 2, "q4-a8"),
    ("mixtral", "Q5_K", 4, 1, "auto"),
    ("mixtral", "Q4_0", 2, 2, "auto-a8"),
    ("mixtral", "IQ4_NL", 1, 2, "auto"),
    ("gpt_oss", "MXFP4", 4, 1, "none"),
    ("gpt_oss", "Q4_K", 2, 1, "auto-a8"),
    ("gpt_oss", "Q5_1", 2, 2, "auto"),
    ("qwen2_moe", "Q2_K", 2, 1, "auto"),
    ("qwen2_moe", "BF16", 4, 1, "auto"),
    ("qwen2_moe", "Q5_0", 1, 2, "q8"),
    ("olmoe", "Q4_1", 2, 2, "auto"),
    ("glm4_moe", "IQ3_S", 2, 1, "auto"),
    ("dots1", "Q6_K", 4, 1, "auto"),
]


@pytest.fixture
def file_of(tiny: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """A GGUF file of a mixture with matrices of a type."""

    def write(name: str, kind: str, **further: object) -> Path:
        config, fields = MIXTURES[name]
        wide = {**WIDE, **{field: 256 for field in EXPERTS if field in fields}, **FIELDS.get(name, {}), **further}
        if "head_dim" not in fields:
            del wide["head_dim"]  # the hidden size decides
        made = tiny(f"wide {name} {sorted(further)}", config, {**fields, **wide})
        convert(made.directory, tmp_path / "model.gguf", kind=gguf.GGMLQuantizationType[kind])
        return tmp_path / "model.gguf"

    return write


@pytest.mark.parametrize(("name", "kind", "ranks", "stages", "scheme"), some(CASES, USUAL))
def test_experts_of_any_type(name, kind, ranks, stages, scheme, file_of, check_same):
    check_same(file_of(name, kind), ranks, stages, quantization=scheme)


def test_the_ranks_of_an_llm_map_one_packed_file(file_of, sizes, tmp_path):
    """The first process packs it, the ranks of the others read their rows of it."""
    path = file_of("qwen3_moe", "Q8_0", num_experts=32)  # 20 MB: large enough to be kept packed
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=2, ignore_eos=True)
    prompts = [{"prompt_token_ids": [(i * 7 + 3) % 128 for i in range(length)]} for length in (60, 7)]
    said, options = [], {**sizes, "packed_cache": str(tmp_path / "packed")}
    for parallel in ({}, {"tensor_parallel_size": 2}):
        with LLM(str(path), **options, **parallel) as llm:
            answers = llm.generate(prompts, params, use_tqdm=False)
        said.append([(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in answers])
        assert len(list((tmp_path / "packed").glob("*.packed"))) == 1
    assert said[1] == said[0]
