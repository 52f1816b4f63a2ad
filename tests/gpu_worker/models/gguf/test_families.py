"""GGUF files of architectures that run through Transformers say what Transformers says of the model they came from.

ERNIE is here because it comes from the same converter; it runs as a Llama.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from differences import difference
from effort import diagonal
from gguf_converter import ARCHITECTURES, convert
from gguf_models import encoded, finish
from instruction_sets import OPS
from transformers_types import MIXTURES, SMALL, TYPES, WIDE

from gpu_worker.models.gguf.families import read_family
from gpu_worker.models.gguf.header import GgufHeader
from gpu_worker.ops import native
from octavo.model_files.gguf import GgufFile
from octavo.model_files.gguf_support import THROUGH_TRANSFORMERS
from octavo.request.errors import BadModel, InvalidArgument

PROMPT = [(7 * i + 3) % 128 for i in range(50)]
PROMPTS = [[(i * 5 + 3) % 128 for i in range(length)] for length in (30, 2)]
SEVEN = {"num_hidden_layers": 7}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
NEAR = {"rope_type": "default", "rope_theta": 1e4}
MODELS = {  # by a name: the class of the configuration, and its fields
    "gemma3": ("Gemma3Text", {**WIDE, **SEVEN, "sliding_window": 11, "query_pre_attn_scalar": 16}),
    "gemma3-scaled": (
        "Gemma3Text",
        {**WIDE, **SEVEN, "sliding_window": 11, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0}
        | {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": NEAR}, "tie_word_embeddings": False},
    ),
    "gemma": ("Gemma", WIDE),
    "qwen2_moe": MIXTURES["qwen2_moe"],
    "qwen3_moe": ("Qwen3Moe", {**MIXTURES["qwen3_moe"][1], "norm_topk_prob": True}),
    "qwen3_moe-yarn": ("Qwen3Moe", {**MIXTURES["qwen3_moe"][1], "norm_topk_prob": True, "rope_parameters": YARN}),
    "mixtral": MIXTURES["mixtral"],
    "olmo2": TYPES["olmo2"],
    "olmo3": TYPES["olmo3"],
    "olmo3-yarn": (
        "Olmo3",
        {**TYPES["olmo3"][1], "rope_parameters": {"full_attention": YARN, "sliding_attention": NEAR}},
    ),
    "granite": TYPES["granite"],
    "granite-biased": ("Granite", {**TYPES["granite"][1], "attention_bias": True, "tie_word_embeddings": True}),
    "granitemoe": TYPES["granitemoe"],
    "granitemoeshared": TYPES["granitemoeshared"],
    "glm4": ("Glm4", {**WIDE, "eos_token_id": None}),
    "starcoder2": TYPES["starcoder2-unwindowed"],
    "stablelm": TYPES["stablelm"],
    "stablelm-parallel": TYPES["stablelm-parallel"],
    "cohere": TYPES["cohere"],
    "cohere-plain": ("Cohere", SMALL),
    "cohere2": ("Cohere2", {**SMALL, "sliding_window": 11, "head_dim": 8}),
    "exaone4": TYPES["exaone4"],
    "exaone4-unwindowed": ("Exaone4", {**SMALL, "sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "ernie4_5": TYPES["ernie4_5"],
    "ernie4_5-untied": ("Ernie4_5", {**WIDE, "tie_word_embeddings": False}),
    "gpt_oss": ("GptOss", {**MIXTURES["gpt_oss"][1], "swiglu_limit": 7.0}),
    "olmoe": MIXTURES["olmoe"],
    "olmoe-wide": ("Olmoe", {**MIXTURES["olmoe"][1], "hidden_size": 256, "intermediate_size": 256}),
    "glm4_moe": MIXTURES["glm4_moe"],
    "glm4_moe-grouped": MIXTURES["glm4_moe-grouped"],
    "dots1": ("Dots1", {**MIXTURES["dots1"][1], "sliding_window": None, "layer_types": ["full_attention"] * 4}),
}


@pytest.fixture
def made(tiny, monkeypatch):
    """The models of MODELS by their names."""

    def make(name: str):
        monkeypatch.setitem(TYPES, f"gguf {name}", MODELS[name])
        return tiny(f"gguf {name}")

    return make


def test_every_architecture_has_a_model_here():
    written = {ARCHITECTURES[transformers.AutoConfig.for_model(made_of(name)).model_type] for name in MODELS}
    own = {"llama", "ernie4_5", "qwen2moe", "qwen3moe", "dots1", "glm4moe", "gpt-oss", "olmoe"}
    assert written - own == set(THROUGH_TRANSFORMERS)


def made_of(name: str) -> str:
    return getattr(transformers, f"{MODELS[name][0]}Config").model_type


@pytest.mark.parametrize(("name", "on_ops"), diagonal(list(MODELS), OPS), indirect=["on_ops"])
@pytest.mark.usefixtures("on_ops")
def test_a_gguf_file_says_what_transformers_says(name, made, load, all_logits, greedy, tmp_path):
    """The model that was stored, not read again: nothing of it may be lost on the way into the file and back."""
    model, path = made(name), tmp_path / "model.gguf"
    convert(model.directory, path)
    runner = load(path)
    assert difference(all_logits(runner, PROMPT), model.logits(PROMPT)) < 1e-4
    for prompt, output in zip(PROMPTS, greedy(runner, PROMPTS, 32), strict=True):
        rows = model.logits(prompt + output)[len(prompt) - 1 : -1]
        assert output == rows.argmax(-1).tolist()
    assert runner.info.eos_token_ids == (2,)


def rounded(stored: str, tensor: torch.Tensor, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    """What the tensor means in a file whose matrices are of `kind`."""
    if tensor.dim() < 2 or "norm" in stored or "gate_inp_shexp" in stored:
        return tensor
    return encoded(tensor.contiguous().numpy(), kind.name)[1]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
@pytest.mark.parametrize("name", ["granitemoe"])
def test_matrices_and_experts_may_be_of_any_type(name, kind, made, load, all_logits, tmp_path):
    """Files of the same numbers, quantized and in floats, give the same bits."""
    own = gguf.GGMLQuantizationType[kind]
    convert(made(name).directory, tmp_path / "floats.gguf", lambda stored, x: rounded(stored, x, own))
    convert(made(name).directory, tmp_path / "quantized.gguf", kind=own)
    found = all_logits(load(tmp_path / "quantized.gguf"), PROMPT)
    assert torch.equal(found, all_logits(load(tmp_path / "floats.gguf"), PROMPT))
    assert difference(found, made(name).logits(PROMPT)) > 1e-4


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in ("qwen2_moe", "mixtral", "glm4_moe") for kind in ("Q8_0", "Q4_0", "F16")),
        ("gpt_oss", "Q8_0"),
        ("gpt_oss", "MXFP4"),
        ("olmoe", "MXFP4"),
        ("glm4_moe", "IQ4_NL"),
        ("olmoe-wide", "IQ4_XS"),
    ],
)
def test_experts_are_multiplied_on_the_bits_of_the_file(name, kind, made, load, all_logits, tmp_path):
    """Beside a file of floats with the same numbers. What is rounded then are inputs, and only by `auto`."""
    own = gguf.GGMLQuantizationType[kind]
    convert(made(name).directory, tmp_path / "floats.gguf", lambda stored, x: rounded(stored, x, own))
    convert(made(name).directory, tmp_path / "own.gguf", kind=own)
    expected = all_logits(load(tmp_path / "floats.gguf"), PROMPT)
    exact, fast = (load(tmp_path / "own.gguf", quantization=scheme) for scheme in ("none", "auto"))
    assert difference(all_logits(exact, PROMPT), expected) < 1e-5
    assert difference(all_logits(fast, PROMPT), expected) < 0.05
    assert kind == "F16" or kind.lower().removesuffix("_0") in fast._decoder.name


def test_a_second_start_takes_the_converted_weights(made, load, all_logits, tmp_path):
    path = tmp_path / "model.gguf"
    convert(made("olmo2").directory, path)
    first = all_logits(load(path), PROMPT)
    (kept,) = (tmp_path / "cache").glob("*.safetensors")
    written = kept.stat().st_mtime_ns
    assert torch.equal(all_logits(load(path), PROMPT), first)
    assert kept.stat().st_mtime_ns == written
    assert difference(all_logits(load(path, dtype="bfloat16"), PROMPT), first) < 0.1


def test_factors_divide_frequencies(made, load, all_logits, tmp_path):
    """llama.cpp stores Llama 3's scaling so. Factors of 2 everywhere are linear scaling by 2."""
    name = "exaone4-unwindowed"
    convert(made(name).directory, tmp_path / "m.gguf", extra={"rope_freqs.weight": torch.full((4,), 2.0)})
    model = transformers.AutoModelForCausalLM.from_pretrained(made(name).directory).eval()
    model.model.rotary_emb.inv_freq /= 2
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    assert difference(all_logits(load(tmp_path / "m.gguf"), PROMPT), expected) < 1e-4
    convert(made(name).directory, tmp_path / "n.gguf", extra={"rope_freqs.weight": torch.full((3,), 2.0)})
    with pytest.raises(BadModel, match="3 factors of rotary positions"):
        load(tmp_path / "n.gguf")


def test_a_model_in_several_files_is_read_as_it_is(made, load, all_logits, tmp_path):
    """Its cached weights are those of all files: another last part is another model."""
    convert(made("olmo2").directory, tmp_path / "whole.gguf")
    convert(made("olmo2").directory, tmp_path / "parted.gguf", in_part=10)
    first = tmp_path / "parted-00001-of-00005.gguf"
    expected = all_logits(load(tmp_path / "whole.gguf"), PROMPT)
    runner = load(first)
    assert torch.equal(all_logits(runner, PROMPT), expected)
    convert(made("olmo2").directory, tmp_path / "parted.gguf", lambda _, x: x * 1.5, in_part=10)
    changed = load(first)
    assert changed.info.fingerprint != runner.info.fingerprint
    assert not torch.equal(all_logits(changed, PROMPT), expected)


# What a file does not say


def test_a_silent_file_is_what_llama_cpp_takes_it_for(made, load, all_logits, tmp_path):
    """Scales of Granite, patterns of windows, and the second base of Gemma 3."""
    for name, silent in (
        ("gemma3", {"rope.freq_base_swa": None, "attention.sliding_window_pattern": None}),
        ("exaone4", {"attention.sliding_window_pattern": None}),
        ("olmo3", {"attention.sliding_window_pattern": None, "rope.freq_base_swa": None}),
    ):
        path = tmp_path / f"{name}.gguf"
        convert(made(name).directory, path, more=silent)
        assert difference(all_logits(load(path), PROMPT), made(name).logits(PROMPT)) < 1e-4
    path = tmp_path / "granite.gguf"
    scales = ("attention.scale", "embedding_scale", "residual_scale")
    convert(made("granite").directory, path, more=dict.fromkeys(scales))
    config = {**json.loads((made("granite").directory / "config.json").read_text()), "attention_multiplier": 8**-0.5}
    config |= {"embedding_multiplier": 1.0, "residual_multiplier": 1.0}
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    (plain / "model.safetensors").symlink_to(made("granite").directory / "model.safetensors")
    assert difference(all_logits(load(path), PROMPT), all_logits(load(plain), PROMPT)) < 1e-5


def read_bare(path: Path, arch: str, layers: int) -> Mapping[str, Any]:
    """The configuration of a file that says little: four heads of 32, of 64 numbers."""
    writer = gguf.GGUFWriter(path, arch)
    settings = {"block_count": layers, "context_length": 8192, "embedding_length": 64, "attention.head_count": 4}
    for key, value in (settings | {"attention.key_length": 32, "attention.value_length": 32}).items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_layer_norm_rms_eps(1e-6)
    shapes = {"token_embd": (8, 64), "blk.0.attn_q": (128, 64), "blk.0.attn_k": (128, 64), "blk.0.ffn_down": (64, 32)}
    for name, shape in (shapes | {f"blk.{layer}.attn_norm": (64,) for layer in range(layers)}).items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    finish(writer)
    with GgufFile(path) as file:
        return read_family(GgufHeader(file, arch)).config


def test_the_large_models_of_two_families_are_known_by_their_layers(tmp_path):
    """llama.cpp knows what their files leave out: a scale of scores, and windows."""
    sizes = [read_bare(tmp_path / f"g{n}.gguf", "gemma3", n)["query_pre_attn_scalar"] for n in (26, 62)]
    assert sizes == [32, 16]
    small, large = (read_bare(tmp_path / f"e{n}.gguf", "exaone4", n) for n in (30, 64))
    assert (small["sliding_window"], large["sliding_window"]) == (None, 4096)
    assert set(small["layer_types"]) == {"full_attention"}
    assert large["layer_types"][:4] == ["sliding_attention"] * 3 + ["full_attention"]


@pytest.mark.skipif(native.load() is None, reason="the extension was not built")
def test_ernie_runs_as_a_llama_on_the_bits_of_its_file(made, load, all_logits, tmp_path):
    own = gguf.GGMLQuantizationType.Q8_0
    convert(made("ernie4_5").directory, tmp_path / "model.gguf", kind=own)
    convert(made("ernie4_5").directory, tmp_path / "floats.gguf", lambda stored, x: rounded(stored, x, own))
    runner = load(tmp_path / "model.gguf", quantization="none")
    assert runner._decoder.name.startswith("llama in one call (q8;")
    assert difference(all_logits(runner, PROMPT), all_logits(load(tmp_path / "floats.gguf"), PROMPT)) < 1e-4


def test_starcoder2_runs_as_far_as_its_window_which_no_file_names(made, load, tmp_path):
    for context, bounded in ((128, 128), (16384, 4096)):
        path = tmp_path / f"{context}.gguf"
        convert(made("starcoder2").directory, path, more={"context_length": context})
        assert load(path)._decoder.context_tokens == bounded


# What is refused


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("granite", {"attention.clamp_kqv": 1.0}, r"does not know, .*: granite\.attention\.clamp_kqv"),
        ("qwen3_moe", {"expert_weights_scale": 2.0}, r"does not know, .*: qwen3moe\.expert_weights_scale"),
        ("gemma", {"attention.causal": False}, "predicts no next token"),
        ("gemma3", {"attention.value_length": 8}, r"keys and values have different sizes"),
        ("exaone4", {"nextn_predict_layers": 1}, "nextn_predict_layers"),
        ("glm4", {"nextn_predict_layers": 1}, "nextn_predict_layers"),
        ("cohere2", {"rope.dimension_count": 4}, "turns 4 of 8 dimensions of a head"),
        ("gemma", {"rope.scaling.type": "longrope"}, r"rope\.scaling\.type 'longrope' is not read"),
        ("qwen3_moe-yarn", {"rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ("olmo2", {"expert_count": 4}, "has 4 experts, which are read of llama"),
        ("olmo3", {"attention.sliding_window_pattern": [True]}, "sliding_window_pattern is"),
        ("olmo2", {"block_count": 900}, "900 layers in"),
        ("glm4_moe", {"expert_gating_func": 1}, "expert_gating_func is not that of a sigmoid"),
        ("glm4_moe", {"expert_shared_count": 3}, "the 3 experts that all tokens ask have 32 rows together"),
        ("olmoe", {"attention.clamp_kqv": 1.0}, r"does not know, .*: olmoe\.attention\.clamp_kqv"),
        ("gpt_oss", {"expert_gating_func": 1}, r"does not know, .*: gpt-oss\.expert_gating_func"),
    ],
)  # fmt: skip
def test_a_setting_that_is_not_understood_is_refused_by_name(name, more, message, made, load, tmp_path):
    convert(made(name).directory, tmp_path / "model.gguf", more=more)
    with pytest.raises(BadModel, match=message):
        load(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("name", "dropped", "message"),
    [
        ("qwen3_moe", "blk.1.ffn_up_exps.weight", r"no tensor 'blk\.1\.ffn_up_exps\.weight'"),
        ("gpt_oss", "blk.2.attn_sinks.weight", r"no tensor 'blk\.2\.attn_sinks\.weight'"),
        ("gpt_oss", "blk.1.ffn_up_exps.bias", r"no tensor 'blk\.1\.ffn_up_exps\.bias'"),
        ("glm4_moe", "blk.2.exp_probs_b.bias", r"no tensor 'blk\.2\.exp_probs_b\.bias'"),
        ("granite", "blk.3.attn_k.weight", r"lacks: model\.layers\.3\.self_attn\.k_proj\.weight"),
        ("glm4", "blk.0.post_ffw_norm.weight", r"lacks: model\.layers\.0\.post_mlp_layernorm\.weight"),
        ("stablelm-parallel", "blk.2.attn_q_norm.weight", r"no tensor 'blk\.2\.attn_q_norm\.weight'"),
    ],
)  # fmt: skip
def test_a_file_that_lacks_a_tensor_is_refused_by_name(name, dropped, message, made, load, tmp_path):
    convert(made(name).directory, tmp_path / "model.gguf", lambda stored, x: None if stored == dropped else x)
    with pytest.raises(BadModel, match=message):
        load(tmp_path / "model.gguf")


def test_a_tensor_without_a_place_or_of_another_shape_is_refused(made, load, tmp_path):
    convert(made("olmo2").directory, tmp_path / "more.gguf", extra={"blk.0.ffn_gate_inp.weight": torch.ones(4, 32)})
    with pytest.raises(BadModel, match=r"1 tensors of more\.gguf have no place in the model: blk\.0\.ffn_gate_inp"):
        load(tmp_path / "more.gguf")

    def shorter(stored, x):
        return x[:-2] if "blk.1.attn_k." in stored else x

    convert(made("olmo2").directory, tmp_path / "less.gguf", shorter)
    with pytest.raises(BadModel, match=r"k_proj\.weight is \[14, 32\] and should be \[16, 32\]"):
        load(tmp_path / "less.gguf")


def test_schemes_of_octavos_own_decoders_are_refused(made, load, tmp_path):
    convert(made("gemma").directory, tmp_path / "model.gguf")
    with pytest.raises(InvalidArgument, match="q8 needs native ops"):
        load(tmp_path / "model.gguf", quantization="q8")
