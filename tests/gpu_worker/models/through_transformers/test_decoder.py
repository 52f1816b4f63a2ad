"""Decoders through Transformers: types beyond those of test_architectures.py, and what `verify` cannot see."""

import pytest
import transformers
from transformers_types import MIXTURES, SMALL, TYPES, WIDE

from gpu_worker.models import model_kind
from gpu_worker.models.model_kind import THROUGH_TRANSFORMERS
from octavo.request.errors import BadModel

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "short_mscale": 1.1,
    "long_mscale": 1.3,
    "original_max_position_embeddings": 64,
}


IN_ARCHITECTURES = {"opt", "gpt_neox", "phi"}  # which tests their tokens, and those of TYPES


def test_every_type_that_runs_through_transformers_has_a_tiny_model():
    kinds = {getattr(transformers, f"{kind}Config").model_type for kind, _ in TYPES.values()}
    assert kinds | IN_ARCHITECTURES == set(THROUGH_TRANSFORMERS)


def test_longrope_runs_up_to_the_original_context(tiny, load, greedy, caplog):
    """Past it, every position would turn otherwise, those of other sequences and of cached keys, too."""
    model = tiny("phimoe-longrope", "Phimoe", {**TYPES["phimoe"][1], "rope_parameters": LONG_ROPE})
    runner = load(model.directory)
    assert runner.info.context_tokens == 64
    assert "longrope is not supported past the original context of 64 tokens" in caplog.text
    prompts = [[(j * 11) % 128 for j in range(40)], [5]]
    for prompt, output in zip(prompts, greedy(runner, prompts, 24), strict=True):
        assert output == model.greedily(prompt, output)


def test_a_type_that_transformers_does_not_know_is_refused_in_one_line(altered, load):
    with pytest.raises(BadModel, match="model type `of-nobody` but Transformers does not recognize") as refused:
        load(altered("opt", model_type="of-nobody", architectures=None))
    assert "\n" not in refused.value.message and "pip install" not in refused.value.message


NO_CACHE = {name: value for name, value in WIDE.items() if name != "num_key_value_heads"}
BOUNDED = {**MIXTURES["olmoe"][1], "sliding_window": 40}
CPM, XLM = {"hidden_size": 32, "num_hidden_layers": 1, "dim_ff": 32}, {"emb_dim": 32, "n_layers": 2, "n_heads": 4}
UNKNOWN = [
    ("Doge", SMALL, "layer 0 has a mask of its own, which pages do not know"),
    ("DiffLlama", SMALL, "layer 0 attends more than once for a token"),
    ("HrmText", {**NO_CACHE, "prefix_lm": False}, "layer 0 attends more than once for a token"),
    ("MiMoV2Flash", MIXTURES["glm4_moe"][1], "layer 0 has keys of shape .* and values of"),
    ("CpmAnt", {"vocab_size": 128, **CPM}, "takes no positions"),
    ("XLM", {"vocab_size": 128, **XLM}, "0 of 2 layers use the attention interface"),
    # Attention is not told of a window, which is longer than the prompt of `verify`: no difference would be seen.
    ("Phimoe", {**BOUNDED, "num_local_experts": 4}, r"masks have windows of \[40\] tokens"),
    ("Qwen2Moe", {**BOUNDED, "use_sliding_window": True, "max_window_layers": 2}, "layer 0 is windowed"),
]


@pytest.mark.parametrize(("kind", "fields", "reason"), UNKNOWN)
def test_a_type_that_nobody_has_looked_at_is_refused_by_what_its_code_does(
    kind, fields, reason, tiny, load, monkeypatch
):
    """Types whose names are known to be refused stand for those of a later Transformers, whose names are not."""
    monkeypatch.setattr(model_kind, "OWN_ATTENTION", {})
    with pytest.raises(BadModel, match=reason):
        load(tiny(f"{kind}-unknown", kind, fields).directory)


def test_settings_that_transformers_refuses_are_not_left_out(altered, load):
    with pytest.raises(BadModel, match="IQuestCoder does not support `clip_qkv`"):
        load(altered("iquestcoder", clip_qkv=0.5))
