"""Every supported architecture computes what Transformers computes; the others are refused with a reason."""

import copy

import pytest
import torch
from differences import difference
from effort import diagonal, is_long
from instruction_sets import OPS
from transformers_types import DENSE, LATENTS, MIXTURES, TYPES

from gpu_worker import LLM, SamplingParams
from octavo.request.errors import BadModel

LLAMAS = (
    *("llama", "llama-llama3", "llama-yarn", "llama-linear", "llama-dynamic", "llama-biases", "mistral", "qwen2"),
    *("qwen3", "smollm3", "phi3", "phi3-tied", "phi3-longrope", "internlm3", "iquestcoder", *DENSE),
    *(*LATENTS, *MIXTURES),
)
GPTS = (
    *("gpt2", "gpt2-scaled-by-layer", "gpt2-relu", "gptj", "codegen", "gpt-neo", "bloom", "bloom-normed-residual"),
    *("falcon-7b", "falcon-40b", "falcon-11b", "falcon-rw", "falcon-sequential", "mpt", "mpt-clipped"),
)
THROUGH_TRANSFORMERS = ("opt", "gemma4_text", "gpt-neox", "phi", "axk1", "qwen3_5_text", "bamba")
OURS = {
    **dict.fromkeys(LLAMAS, "llama"),
    **dict.fromkeys(GPTS, "gpt"),
    **{name: f"transformers:{name}" for name in THROUGH_TRANSFORMERS},
    "gpt-neox": "transformers:gpt_neox",
}
TOKENS = [(7 * i + 3) % 128 for i in range(50)]
LONG = [(i * 29 + 5) % 128 for i in range(41)]
PROMPTS = [LONG, [7], [3, 1, 2] * 5, [*LONG[:33], 9, 9], [64, 65]]


@pytest.mark.parametrize(("name", "on_ops"), diagonal(list(OURS), OPS), indirect=["on_ops"])
@pytest.mark.usefixtures("on_ops")
def test_logits_and_tokens_are_those_of_transformers(name, tiny, load, all_logits):
    runner = load(tiny(name).directory)
    assert runner._decoder.name.split()[0] == OURS[name]
    assert difference(all_logits(runner, TOKENS), tiny(name).logits(TOKENS)) < 1e-4
    check_engine(runner, tiny(name))


@pytest.mark.long
@pytest.mark.parametrize("name", TYPES)
def test_tokens_of_further_types_are_those_of_transformers(name, tiny, load):
    check_engine(load(tiny(name).directory), tiny(name))


def check_engine(runner, model):
    """Twelve tokens a step, five prompts, two of which begin alike: pieces, shared blocks, batches that change."""
    with LLM(str(model.directory), runner=runner, max_batch_tokens=12, max_batch_sequences=8) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=48 if is_long() else 32, ignore_eos=True)
        outputs = [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, params, use_tqdm=False)]
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output == model.greedily(prompt, output)
    assert len({token for output in outputs for token in output}) > 8, "a model that repeats itself tests little"


def test_a_context_that_needs_no_long_positions_gets_the_short_ones(tiny, load, all_logits):
    """Transformers turns by the length of each sequence; we turn by the longest that is served (longrope)."""
    model = tiny("phi3-longrope")
    expected = model.logits(TOKENS[:32])
    short, whole = load(model.directory, context_tokens=32), load(model.directory)
    assert difference(all_logits(short, TOKENS[:32]), expected) < 1e-4
    assert difference(all_logits(whole, TOKENS[:32]), expected) > 1e-3
    assert short.info.fingerprint != whole.info.fingerprint, "workers with other contexts compute other tokens"
    assert load(model.directory, context_tokens=33).info.fingerprint == whole.info.fingerprint


def test_a_model_that_keeps_something_between_steps_is_refused(tiny, load, monkeypatch):
    """`verify` finds what neither configuration nor attention function tell."""
    from gpu_worker.models.through_transformers import decoder

    whole = decoder.TransformersDecoder._logits

    def shifted(self, inputs, rows):  # as if positions were counted within the step
        places = inputs["position_ids"]
        return whole(self, {**inputs, "position_ids": places - places[:, :1]}, rows)

    monkeypatch.setattr(decoder.TransformersDecoder, "_logits", shifted)
    with pytest.raises(BadModel, match="through pages its logits differ"):
        load(tiny("opt").directory)


@pytest.mark.parametrize(("name", "on_ops"), diagonal(list(OURS), OPS), indirect=["on_ops"])
@pytest.mark.usefixtures("on_ops")
def test_bfloat16_errs_no_more_than_transformers_does(name, tiny, load, all_logits):
    """Against float32 on the same weights: eight bits of mantissa cost both sides something.

    A token that asks another expert makes a jump, on either side: mixtures have more prompts.
    """
    runner = load(tiny(name).directory, dtype="bfloat16")
    assert runner.info.kv_dtype == "bfloat16"
    half = copy.deepcopy(tiny(name).model).to(torch.bfloat16)
    exact = copy.deepcopy(half).float()
    mixed = name in (*LATENTS, *MIXTURES)
    count = 12 if mixed else 4
    prompts = [[((7 + 2 * seed) * i + 3 + seed) % 128 for i in range(50)] for seed in range(count)]
    with torch.inference_mode():
        truth, theirs = (each(torch.tensor(prompts), use_cache=False).logits.float() for each in (exact, half))
    ours = torch.stack([all_logits(runner, tokens) for tokens in prompts]).float()
    errors = [float((side - truth).norm()) for side in (ours, theirs)]
    most = 2.0 if mixed else 1.05
    assert errors[0] < most * errors[1]
