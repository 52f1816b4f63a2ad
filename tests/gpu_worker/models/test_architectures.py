"""Every supported architecture computes what Transformers computes; the others are refused with a reason."""

import copy

import pytest
import torch
from differences import difference
from effort import diagonal
from instruction_sets import OPS
from transformers_types import MIXTURES

from octavo.request.errors import BadModel

LLAMAS = (
    *("llama", "llama-llama3", "llama-yarn", "llama-linear", "llama-dynamic", "llama-biases", "mistral", "qwen2"),
    *("qwen3", "smollm3", "phi3", "phi3-tied", "phi3-longrope", "internlm3", "iquestcoder", *MIXTURES),
)
GPTS = (
    *("gpt2", "gpt2-scaled-by-layer", "gpt2-relu", "gptj", "codegen", "gpt-neo", "bloom", "bloom-normed-residual"),
    *("falcon-7b", "falcon-40b", "falcon-11b", "falcon-rw", "falcon-sequential", "mpt", "mpt-clipped"),
)
THROUGH_TRANSFORMERS = {
    "opt": "transformers:opt",
    "gemma2": "transformers:gemma2",
    "gemma3": "transformers:gemma3_text",
    "gpt-neox": "transformers:gpt_neox",
    "phi": "transformers:phi",
    "deepseek_v2": "transformers:deepseek_v2",
    "qwen3_5_text": "transformers:qwen3_5_text",
    "bamba": "transformers:bamba",
}
OURS = {**dict.fromkeys(LLAMAS, "llama"), **dict.fromkeys(GPTS, "gpt"), **THROUGH_TRANSFORMERS}
NUM_TOKENS = 64


@pytest.mark.parametrize(("name", "on_ops"), diagonal(list(OURS), OPS), indirect=["on_ops"])
@pytest.mark.usefixtures("on_ops")
def test_greedy_tokens_are_those_of_transformers(name, tiny, load, greedy):
    """A batch of prompts of different lengths, 64 tokens each."""
    model, runner = tiny(name), load(tiny(name).directory)
    assert runner._decoder.name.split()[0] == OURS[name]
    prompts = [[(i * 37 + j * 11) % 128 for j in range(length)] for i, length in enumerate((20, 1, 9))]
    outputs = greedy(runner, prompts, NUM_TOKENS)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output == model.greedily(prompt, output)
    assert len({token for output in outputs for token in output}) > 8, "a model that repeats itself tests little"


@pytest.mark.parametrize("name", OURS)
def test_logits_are_within_1e4_of_transformers(name, tiny, load, all_logits):
    """For all positions of a prompt: the largest difference over the largest logit."""
    model, runner = tiny(name), load(tiny(name).directory)
    tokens = [(7 * i + 3) % 128 for i in range(50)]
    logits = all_logits(runner, tokens)
    expected = model.logits(tokens)
    assert difference(logits, expected) < 1e-4


def test_a_context_that_needs_no_long_positions_gets_the_short_ones(tiny, load, all_logits):
    """Transformers turns by the length of each sequence; we turn by the longest that is served (longrope)."""
    model = tiny("phi3-longrope")
    tokens = [(7 * i + 3) % 128 for i in range(32)]
    expected = model.logits(tokens)
    short, whole = load(model.directory, context_tokens=32), load(model.directory)
    assert difference(all_logits(short, tokens), expected) < 1e-4
    assert difference(all_logits(whole, tokens), expected) > 1e-3
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
    model, runner = tiny(name), load(tiny(name).directory, dtype="bfloat16")
    assert runner.info.kv_dtype == "bfloat16"
    half = copy.deepcopy(model.model).to(torch.bfloat16)
    exact = copy.deepcopy(half).float()
    errors = torch.zeros(2)
    for seed in range(12 if name in MIXTURES else 4):
        tokens = [((7 + 2 * seed) * i + 3 + seed) % 128 for i in range(50)]
        with torch.inference_mode():
            truth, theirs = (each(torch.tensor([tokens]), use_cache=False).logits[0].float() for each in (exact, half))
        ours = all_logits(runner, tokens).float()
        errors += torch.stack([(side - truth).square().sum() for side in (ours, theirs)])
    most = 2.0 if name in MIXTURES else 1.05
    assert float((errors[0] / errors[1]).sqrt()) < most
