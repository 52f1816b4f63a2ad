"""A group of any size says what one process says, to the bit, whatever it is asked."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from loras import ATTENTION, write_lora

from gpu_worker import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from gpu_worker.running.loading import load_runner
from gpu_worker.steps.runner import Runner

from .conftest import SIZES

PROMPTS = [f"{'A tale of ' * (number % 5)}number {number}" for number in range(12)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, logprobs=3),
    SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=40, logprobs=1, n=2, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2),
    SamplingParams(temperature=1.0, seed=1, max_tokens=24, structured_outputs=StructuredOutputsParams(regex="[a-f]+")),
    SamplingParams(temperature=1.1, min_p=0.01, seed=3, max_tokens=40),  # of these, other hosts send sums
    SamplingParams(temperature=0, max_tokens=40),  # and of these, candidates
    SamplingParams(temperature=0.9, top_k=8, top_p=0.9, seed=5, max_tokens=40, n=2, presence_penalty=0.6),
]


def outputs(runner: Runner, folder: Path, loras: Sequence[LoRARequest] = (), **settings: Any) -> list[Any]:
    """Tokens and log probabilities of many prompts that share too few blocks."""
    sizes = {name: SIZES[name] for name in ("max_batch_tokens", "max_batch_sequences")}
    llm = LLM(str(folder), runner=runner, **sizes, **settings)
    params = [PARAMS[number % len(PARAMS)] for number in range(len(PROMPTS))]
    asked = [(None, *loras)[number % (len(loras) + 1)] for number in range(len(PROMPTS))] if loras else None
    return [
        (each.prompt_logprobs, [(output.token_ids, output.logprobs) for output in each.outputs])
        for each in llm.generate(PROMPTS, params, lora_request=asked, use_tqdm=False)
    ]


def adapters(folder: Path, where: Path) -> list[LoRARequest]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    forms: list[dict[str, Any]] = [
        {"rank": 8, "modules": ATTENTION, "dtype": torch.bfloat16},
        {"rank": 5, "modules": ("k_proj", "o_proj")},
    ]
    if model.config.model_type == "llama":
        forms += [{"rank": 4}, {"rank": 16, "modules": ("up_proj", "down_proj", "v_proj"), "dtype": torch.float16}]
    return [
        LoRARequest(f"a{i}", i, str(write_lora(where / f"a{i}", model, seed=i, **form)))
        for i, form in enumerate(forms, 1)
    ]


@pytest.mark.parametrize(
    ("kind", "ranks", "stages", "options"),
    [
        pytest.param("llama", 2, 1, {"dtype": "float32"}, marks=pytest.mark.long),
        ("llama", 3, 1, {"quantization": "q4-a8", "kv_cache_dtype": "int8", "threads": 2}),
        pytest.param("llama", 5, 1, {"quantization": "q4-a8"}, marks=pytest.mark.long),  # more ranks than KV heads
        ("llama", 1, 3, {"dtype": "float32", "threads": 2}),
        ("llama", 2, 2, {"quantization": "q8", "kv_cache_dtype": "int8"}),
        pytest.param("llama", 4, 2, {"dtype": "float32"}, marks=pytest.mark.long),
        pytest.param("Qwen2Moe", 3, 1, {"quantization": "q8", "threads": 2}, marks=pytest.mark.long),
        pytest.param("GPTJ", 2, 1, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}, marks=pytest.mark.long),
        pytest.param("GptOss", 4, 2, {"quantization": "q4"}, marks=pytest.mark.long),
        pytest.param("Falcon", 4, 2, {"dtype": "float32"}, marks=pytest.mark.long),
    ],
)
def test_a_group_computes_the_bits_of_one_process(group, folders, tmp_path, kind, ranks, stages, options):
    folder = folders(kind)
    alone = load_runner(str(folder), **{**SIZES, **options})
    loras = [] if alone.info.lora_support.refusal else adapters(folder, tmp_path)
    expected = outputs(alone, folder, loras)
    several = group(ranks, stages=stages, model=folder, **options)
    assert several.info == alone.info
    assert outputs(several, folder, loras) == expected
    if loras:
        assert outputs(several, folder) != expected
