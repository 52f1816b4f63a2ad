"""GGUF files say what Transformers says of the model they came from, through it and on octavo's own decoders."""

from collections.abc import Mapping
from typing import Any

import gguf
import pytest
import torch
import transformers
from differences import difference
from effort import diagonal
from gguf_converter import ARCHITECTURES, convert
from gguf_gpt import MODELS as GPT
from gguf_models import encoded, write_bare
from gguf_recurrent import MODELS as RECURRENT
from instruction_sets import OPS
from transformers_types import DENSE, LATENT, LATENTS, MIXTURES, NARROW, ROUTED_EXPERTS, SMALL, TYPES, WIDE

from gpu_worker.models.gguf.families import read_family
from gpu_worker.models.gguf.header import GgufHeader
from gpu_worker.ops import native
from octavo.model_files.gguf import GgufFile
from octavo.model_files.gguf_support import OWN, THROUGH_TRANSFORMERS
from octavo.request.errors import BadModel

PROMPT = [(7 * i + 3) % 128 for i in range(50)]
PROMPTS = [[(i * 5 + 3) % 128 for i in range(length)] for length in (30, 2)]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
SHARPENED = {**YARN, "beta_fast": 8.0, "beta_slow": 2.0}
MINISTRAL = {**SHARPENED, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
NEAR = {"rope_type": "default", "rope_theta": 1e4}
GEMMA3 = {**WIDE, "num_hidden_layers": 7, "sliding_window": 11, "query_pre_attn_scalar": 16}
FAR_AND_NEAR = {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": NEAR}, "tie_word_embeddings": False}
FULL = {"sliding_window": None, "layer_types": ["full_attention"] * 4}
QWEN3 = {**MIXTURES["qwen3_moe"][1], "norm_topk_prob": True}
OLMOE = MIXTURES["olmoe"][1]
V2_YARN = {**SHARPENED, "mscale": 0.707, "mscale_all_dim": 0.707}
NEOX = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
LITE = {**LATENT, **ROUTED_EXPERTS, "q_lora_rank": None}
GROUPS = {
    **LATENT,
    **ROUTED_EXPERTS,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
WIDE_LATENT = {**LATENT, **ROUTED_EXPERTS, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32}
MINICPM3 = {**LATENT, "rms_norm_eps": 1e-5, "dim_model_base": 256, "scale_emb": 12, "scale_depth": 1.4}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128}
MODELS = {  # by a name: the class of the configuration, and its fields
    **{name: MIXTURES[name] for name in ("qwen2_moe", "mixtral", "olmoe", "glm4_moe", "glm4_moe-grouped")},
    **{name: TYPES[name] for name in ("granitemoe", "granitemoeshared", "ernie4_5")},
    **{name: DENSE[name] for name in ("olmo2", "olmo3", "granite", "exaone4")},
    **{name: TYPES[name] for name in ("stablelm", "stablelm-parallel", "cohere")},
    **{name: TYPES[name] for name in ("gemma3n_text", "gemma4_text", "gemma4-few", "gemma4-shared", "gemma4-experts")},
    **{name: LATENTS[name] for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")},
    **{
        name: TYPES[name]
        for name in ("arcee", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "jais2", "nemotron", "olmo")
    },
    "afmoe": ("Afmoe", {**TYPES["afmoe"][1], "mup_enabled": True, "num_dense_layers": 2, "route_scale": 1.5}),
    "apertus": ("Apertus", {**SMALL, "rope_parameters": NEAR}),
    "exaone_moe": ("ExaoneMoe", {**WIDE, "sliding_window": 11, **NARROW}),
    "gpt_neox": ("GPTNeoX", {**NEOX, "rope_parameters": {**NEAR, "partial_rotary_factor": 0.5}}),
    "gpt_neox-serial": ("GPTNeoX", {**NEOX, "use_parallel_residual": False}),
    "olmo-unclipped": ("Olmo", {**SMALL, "tie_word_embeddings": True}),
    "phi": ("Phi", SMALL),
    "deepseek_v2-lite": ("DeepseekV2", LITE),
    "deepseek_v2-yarn": ("DeepseekV2", {**LITE, "rope_parameters": V2_YARN}),
    "deepseek_v2-grouped": ("DeepseekV2", {**GROUPS, "topk_method": "group_limited_greedy"}),
    "deepseek_v3-grouped": (
        "DeepseekV3",
        {**GROUPS, "scoring_func": "sigmoid", "rope_parameters": MINISTRAL},
    ),
    "deepseek_v2-wide": ("DeepseekV2", {**WIDE_LATENT, "q_lora_rank": None}),
    "deepseek_v3-wide": ("DeepseekV3", WIDE_LATENT),
    "minicpm3": ("MiniCPM3", MINICPM3),
    "minicpm3-long": (
        "MiniCPM3",
        {**MINICPM3, "rope_parameters": {**LONG, "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [2.0] * 4}},
    ),
    "gemma3": ("Gemma3Text", GEMMA3),
    "gemma3-scaled": ("Gemma3Text", {**GEMMA3, "final_logit_softcapping": 3.0, **FAR_AND_NEAR}),
    "gemma": ("Gemma", WIDE),
    "qwen3_moe": ("Qwen3Moe", QWEN3),
    "qwen3_moe-yarn": ("Qwen3Moe", {**QWEN3, "rope_parameters": YARN}),
    "olmo3-yarn": (
        "Olmo3",
        {**DENSE["olmo3"][1], "rope_parameters": {"full_attention": YARN, "sliding_attention": NEAR}},
    ),
    "granite-biased": ("Granite", {**DENSE["granite"][1], "attention_bias": True, "tie_word_embeddings": True}),
    "glm4": ("Glm4", {**WIDE, "eos_token_id": None}),
    "starcoder2": TYPES["starcoder2-unwindowed"],
    "cohere-plain": ("Cohere", SMALL),
    "cohere2": ("Cohere2", {**SMALL, "sliding_window": 11, "head_dim": 8}),
    "exaone4-unwindowed": ("Exaone4", {**SMALL, **FULL}),
    "ernie4_5-untied": ("Ernie4_5", {**WIDE, "tie_word_embeddings": False}),
    "gpt_oss": ("GptOss", {**MIXTURES["gpt_oss"][1], "swiglu_limit": 7.0}),
    "olmoe-wide": ("Olmoe", {**OLMOE, "hidden_size": 256, "intermediate_size": 256}),
    "minimax_m2": MIXTURES["minimax_m2"],
    "dots1": ("Dots1", {**MIXTURES["dots1"][1], **FULL}),
    "ministral3": ("Ministral3", {**WIDE, "rope_parameters": {**MINISTRAL, "original_max_position_embeddings": 96}}),
    "seed_oss": TYPES["seed_oss"],
    "seed_oss-yarn": ("SeedOss", {**WIDE, "rope_parameters": {**SHARPENED, "attention_factor": 1.3}}),
}


@pytest.fixture
def made(tiny):
    """The models of MODELS by their names."""
    return lambda name: tiny(f"gguf {name}", *MODELS[name])


def test_every_architecture_has_a_model_here():
    kinds = {getattr(transformers, f"{kind}Config").model_type for kind, _ in (MODELS | RECURRENT | GPT).values()}
    found = {ARCHITECTURES[kind] for kind in kinds} | {"nemotron_h_moe"}  # which is one by its layers
    assert found - set(OWN) == set(THROUGH_TRANSFORMERS)


@pytest.mark.parametrize(("name", "on_ops"), diagonal(list(MODELS), OPS), indirect=["on_ops"])
@pytest.mark.usefixtures("on_ops")
def test_a_gguf_file_says_what_transformers_says(name, made, converted, load, all_logits, greedy):
    """The model that was stored, not read again: nothing of it may be lost on the way into the file and back."""
    model, runner = made(name), load(converted(name))
    assert difference(all_logits(runner, PROMPT), model.logits(PROMPT)) < 1e-4
    for prompt, output in zip(PROMPTS, greedy(runner, PROMPTS, 24), strict=True):
        assert output == model.greedily(prompt, output)
    assert runner.info.eos_token_ids == (2,)


@pytest.mark.skipif(native.load() is None, reason="the extension was not built")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("qwen2_moe", "Q8_0"), ("mixtral", "Q4_0"), ("glm4_moe", "F16"), ("glm4_moe", "IQ4_NL")),
        *(("gpt_oss", "Q8_0"), ("gpt_oss", "MXFP4"), ("olmoe", "MXFP4"), ("olmoe-wide", "IQ4_XS")),
        *(("granitemoe", "Q8_0"), ("granitemoe", "Q4_0"), ("granitemoe", "F16"), ("ernie4_5", "Q8_0")),
        *(
            ("gemma4-experts", "Q8_0"),
            ("gemma4-few", "Q4_0"),
            ("deepseek_v3-wide", "IQ4_NL"),
            ("deepseek_v2-wide", "Q8_0"),
        ),
    ],
)
def test_matrices_and_experts_are_those_of_the_file(name, kind, made, converted, load, all_logits):
    """Beside a file of floats with the same numbers. What is rounded then are inputs, by `auto`."""
    own = gguf.GGMLQuantizationType[kind]

    def rounded(stored, tensor):
        if tensor.dim() < 2 or "norm" in stored or "gate_inp_shexp" in stored:
            return tensor
        return encoded(tensor.contiguous().numpy(), kind)[1]

    expected = all_logits(load(converted(name, rounded)), PROMPT)
    path = converted(name, kind=own)
    fast = load(path)
    assert difference(all_logits(fast, PROMPT), expected) < 0.05
    assert difference(all_logits(load(path, quantization="none"), PROMPT), expected) < 2e-5
    assert kind == "F16" or kind.lower().removesuffix("_0") in fast._decoder.name
    if fast._decoder.name.startswith("transformers") and kind != "F16":
        modules = [type(each).__name__ for each in fast._decoder._model.modules() if "Expert" in type(each).__name__]
        assert modules == ["PackedExperts"] * len(modules)
    assert difference(expected, made(name).logits(PROMPT)) > 1e-4


@pytest.mark.skipif(native.load() is None, reason="the extension was not built")
def test_experts_of_which_some_are_in_floats_are_refused_with_the_scheme_that_runs_them(converted, load, all_logits):
    kept = {}

    def without_shared(stored, tensor):
        if stored.endswith("_shexp.weight") and "gate_inp" not in stored:
            kept[stored] = tensor.contiguous()
            return None
        return tensor

    converted("qwen2_moe", without_shared)
    path = converted("qwen2_moe", without_shared, extra=kept, kind=gguf.GGMLQuantizationType.Q8_0)
    with pytest.raises(BadModel, match=r"some experts are in floats .*: say --quantization none"):
        load(path)
    assert (
        difference(
            all_logits(load(path, quantization="none"), PROMPT), all_logits(load(path, quantization="q8"), PROMPT)
        )
        < 0.05
    )


def test_a_second_start_takes_the_converted_weights(converted, load, all_logits, tmp_path):
    path = converted("stablelm")
    first = all_logits(load(path), PROMPT)
    (kept,) = (tmp_path / "cache").glob("*.safetensors")
    written = kept.stat().st_mtime_ns
    assert torch.equal(all_logits(load(path), PROMPT), first)
    assert kept.stat().st_mtime_ns == written
    assert difference(all_logits(load(path, dtype="bfloat16"), PROMPT), first) < 0.1


@pytest.mark.parametrize("name", ["exaone4-unwindowed", "mixtral"])
def test_factors_divide_frequencies(made, converted, load, all_logits, name):
    """llama.cpp stores Llama 3's scaling so. Factors of 2 everywhere are linear scaling by 2."""
    model = transformers.AutoModelForCausalLM.from_pretrained(made(name).directory).eval()
    model.model.rotary_emb.inv_freq /= 2
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    factors = {"rope_freqs.weight": torch.full((len(model.model.rotary_emb.inv_freq),), 2.0)}
    assert difference(all_logits(load(converted(name, extra=factors)), PROMPT), expected) < 1e-4
    with pytest.raises(BadModel, match="3 factors of rotary positions"):
        load(converted(name, extra={"rope_freqs.weight": torch.full((3,), 2.0)}))
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    with pytest.raises(BadModel, match=r"scales positions by rope_freqs\.weight and by .*\.rope\.scaling"):
        load(converted(name, more=scaled, extra=factors))


def test_latent_attention_is_read_whole_as_early_files_have_it_and_layers_that_draft_are_not(
    made, converted, load, all_logits
):
    model = made("deepseek_v3")
    whole = {
        f"blk.{number}.attn_kv_b.weight": layer.self_attn.kv_b_proj.weight.detach()
        for number, layer in enumerate(model.model.model.layers)
    }
    early = {"attention.head_count_kv": 4, "attention.key_length": 24, "attention.value_length": 32}
    early |= dict.fromkeys(("attention.key_length_mla", "attention.value_length_mla"))
    path = converted(
        "deepseek_v3", lambda stored, x: None if "_k_b." in stored or "_v_b." in stored else x, more=early, extra=whole
    )
    assert difference(all_logits(load(path), PROMPT), model.logits(PROMPT)) < 1e-4
    drafting = {**whole, "blk.4.nextn.eh_proj.weight": torch.ones(32, 64)}
    path = converted("deepseek_v3", more={"block_count": 5, "nextn_predict_layers": 1}, extra=drafting)
    assert difference(all_logits(load(path), PROMPT), model.logits(PROMPT)) < 1e-4


@pytest.mark.parametrize(("arch", "kind"), [("qwen2vl", "Qwen2"), ("qwen3vl", "Qwen3"), ("qwen3vlmoe", "Qwen3Moe")])
def test_the_text_of_models_with_pictures_runs_as_its_own_type(arch, kind, tiny, load, all_logits, tmp_path):
    model = tiny(f"text {arch}", kind, QWEN3 if kind == "Qwen3Moe" else WIDE)
    sections = {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3 if arch != "qwen2vl" else None}
    convert(model.directory, tmp_path / "text.gguf", more=sections, arch=arch)
    assert difference(all_logits(load(tmp_path / "text.gguf"), PROMPT), model.logits(PROMPT)) < 1e-4


def test_gemma4_reads_gates_of_experts_by_themselves_and_no_keys_of_layers_that_take_others(
    made, converted, load, all_logits
):
    model = made("gemma4-experts")
    gates = {}
    for number, layer in enumerate(model.model.model.layers):
        for part, tensor in zip(("gate", "up"), layer.experts.gate_up_proj.detach().chunk(2, dim=1), strict=True):
            gates[f"blk.{number}.ffn_{part}_exps.weight"] = tensor.contiguous()
    path = converted("gemma4-experts", lambda stored, x: None if "gate_up" in stored else x, extra=gates)
    assert difference(all_logits(load(path), PROMPT), model.logits(PROMPT)) < 1e-4
    unread = {f"blk.3.{part}.weight": torch.ones(32, 32) for part in ("attn_k", "attn_v", "attn_k_norm")}
    expected = made("gemma4-shared").logits(PROMPT)
    assert difference(all_logits(load(converted("gemma4-shared", extra=unread)), PROMPT), expected) < 1e-4


# What a file does not say


def test_a_silent_file_is_what_llama_cpp_takes_it_for(made, altered, converted, load, all_logits):
    """Scales of Granite, patterns of windows, and the second base of Gemma 3."""
    windows = {"rope.freq_base_swa": None, "attention.sliding_window_pattern": None}
    for name in ("gemma3", "exaone4", "olmo3"):
        assert difference(all_logits(load(converted(name, more=windows)), PROMPT), made(name).logits(PROMPT)) < 1e-4
    unsaid = ("attention.scale", "embedding_scale", "logit_scale", "residual_scale")
    silent = converted("granite", more=dict.fromkeys(unsaid))
    scales = {"attention_multiplier": 8**-0.5, "embedding_multiplier": 1.0, "residual_multiplier": 1.0}
    scales["logits_scaling"] = 1.0
    plain = load(altered("gguf granite", **scales))
    assert difference(all_logits(load(silent), PROMPT), all_logits(plain, PROMPT)) < 1e-5


def test_the_large_models_of_three_families_are_known_by_their_layers(tmp_path):
    """llama.cpp knows what their files leave out: a scale of scores, and windows."""

    def read(arch: str, layers: int) -> Mapping[str, Any]:
        shapes = {"token_embd": (8, 64), "blk.0.attn_q": (128, 64), "blk.0.attn_k": (128, 64)}
        shapes |= {"blk.0.ffn_down": (64, 32), **{f"blk.{layer}.attn_norm": (64,) for layer in range(layers)}}
        with GgufFile(write_bare(tmp_path / f"{arch}-{layers}.gguf", arch, layers, shapes)) as file:
            return read_family(GgufHeader(file, arch)).config

    for arch, layers in (("gemma2", (26, 46)), ("gemma3", (26, 62))):
        assert [read(arch, each)["query_pre_attn_scalar"] for each in layers] == [32, 16]
    silent = read("gemma2", 2)
    assert (silent["attn_logit_softcapping"], silent["final_logit_softcapping"]) == (50.0, 30.0)
    assert (silent["sliding_window"], silent["layer_types"]) == (4096, ["sliding_attention", "full_attention"])
    small, large = (read("exaone4", layers) for layers in (30, 64))
    assert (small["sliding_window"], large["sliding_window"]) == (None, 4096)
    assert set(small["layer_types"]) == {"full_attention"}
    assert large["layer_types"][:4] == ["sliding_attention"] * 3 + ["full_attention"]


def test_starcoder2_runs_as_far_as_its_window_which_no_file_names(converted, load):
    for context, bounded in ((128, 128), (16384, 4096)):
        assert load(converted("starcoder2", more={"context_length": context}))._decoder.context_tokens == bounded


def test_ministral_runs_as_far_as_its_queries_are_not_scaled(converted, load):
    assert load(converted("ministral3"))._decoder.context_tokens == 96


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
        ("qwen3_moe", {"expert_used_count": 0}, "0 of 4 experts"),
        ("gemma", {"context_length": 0}, "context_length is 0"),
        ("gemma", {"embedding_length": 64}, "the header says any x 64"),
        ("cohere2", {"rope.dimension_count": 4}, "turns 4 of 8 dimensions of a head"),
        ("gemma", {"rope.scaling.type": "longrope"}, r"rope\.scaling\.type 'longrope' is not read"),
        ("qwen3_moe-yarn", {"rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ("ministral3", {"rope.scaling.yarn_log_multiplier": 0.5}, "yarn_log_multiplier and yarn_ext_factor"),
        ("seed_oss-yarn", {"rope.scaling.yarn_ext_factor": 0.0}, "yarn_log_multiplier and yarn_ext_factor"),
        ("olmo2", {"expert_count": 4}, "has 4 experts, which are read of llama"),
        ("olmo3", {"attention.sliding_window_pattern": [True]}, "sliding_window_pattern is"),
        ("olmo2", {"block_count": 900}, "900 layers in"),
        ("glm4_moe", {"expert_gating_func": 1}, "expert_gating_func is not that of a sigmoid"),
        ("glm4_moe", {"expert_shared_count": 3}, "the 3 experts that all tokens ask have 32 rows together"),
        ("qwen3_moe", "blk.1.ffn_up_exps.weight", r"no tensor 'blk\.1\.ffn_up_exps\.weight'"),
        ("gpt_oss", "blk.1.ffn_up_exps.bias", r"no tensor 'blk\.1\.ffn_up_exps\.bias'"),
        ("glm4_moe", "blk.2.exp_probs_b.bias", r"no tensor 'blk\.2\.exp_probs_b\.bias'"),
        ("granite", "blk.3.attn_k.weight", r"has nothing of which 'model\.layers\.3\.self_attn\.k_proj\.weight'"),
        ("glm4", "blk.0.post_ffw_norm.weight", r"lacks: model\.layers\.0\.post_mlp_layernorm\.weight"),
        ("gemma3n_text", {"altup.num_inputs": 5}, r"altup_proj\.weight has 3 matrices for 5 streams"),
        ("gemma3n_text", {"activation_sparsity_scale": [0.5]}, "activation_sparsity_scale has no number for each"),
        ("gemma3n_text", {"altup.coef_clip": 2.0}, r"does not know, .*: gemma3n\.altup\.coef_clip"),
        ("gemma4_text", {"attention.scale": 0.5}, r"does not know, .*: gemma4\.attention\.scale"),
        ("gemma4_text", {"attention.value_length_swa": 8}, r"different sizes \(gemma4\.attention\.value_length_swa"),
        ("gemma4_text", {"rope.dimension_count_swa": 8}, "turns 8 of 16 dimensions of a head"),
        ("gemma4_text", {"rope.dimension_count": 8}, r"rope\.dimension_count do not tell how 32 dimensions turn"),
        ("gemma4_text", {"attention.sliding_window_pattern": [True] * 4}, "its last layer has a window"),
        ("gemma4_text", {"attention.sliding_window": 0}, "windows are 0"),
        ("gemma4_text", {"attention.shared_kv_layers": 4}, "4 of 4 layers take the keys of others"),
        ("gemma4-few", {"attention.head_count_kv": [2, 1]}, "head_count_kv has no number for each layer"),
        ("gemma4-experts", {"expert_used_count": 9}, "9 of 4 experts, and tensors of 4"),
        ("gemma4-experts", "blk.1.ffn_down_exps.scale", r"no tensor 'blk\.1\.ffn_down_exps\.scale'"),
        ("gemma4_text", "rope_freqs.weight", r"no tensor 'rope_freqs\.weight'"),
        ("deepseek_v2", {"attention.key_length_mla": 32}, r"heads of 32 and 16, 8 of them turned, .*key_length_mla"),
        ("deepseek_v2", {"attention.value_length_mla": 8}, "heads of 24 and 8"),
        ("deepseek_v2", {"attention.q_lora_rank": 8}, "q_lora_rank is 8, its tensors say 16"),
        ("deepseek_v2", {"expert_weights_norm": True}, r"no DeepSeek has shares of kind 1 that sum to one: True"),
        ("deepseek_v3", {"expert_gating_func": 4}, "no DeepSeek has shares of kind 4"),
        ("deepseek_v3", {"expert_shared_count": 3}, "the 3 experts that all tokens ask have 32 rows together"),
        ("deepseek_v3", {"attention.temperature_scale": 0.1}, r"know, .*: deepseek2\.attention\.temperature_scale"),
        ("deepseek_v3", {"nextn_predict_layers": 4}, "4 of 4 layers draft tokens"),
        ("deepseek_v3", "blk.2.exp_probs_b.bias", r"no tensor 'blk\.2\.exp_probs_b\.bias'"),
        ("deepseek_v3", "blk.1.attn_v_b.weight", r"no tensor 'blk\.1\.attn_v_b\.weight'"),
        ("afmoe", {"expert_weights_norm": False}, r"shares do not sum to one \(afmoe\.expert_weights_norm"),
        ("afmoe", {"expert_gating_func": 1}, "expert_gating_func is not that of a sigmoid"),
        ("ernie4_5_moe", {"expert_gating_func": 2}, "expert_gating_func is not that of a softmax"),
        ("ernie4_5_moe", {"leading_dense_block_count": 4}, "no layer has experts"),
        ("ernie4_5_moe", {"expert_shared_count": 3}, "the 3 experts that all tokens ask have 64 rows together"),
        ("hunyuan_v1_moe", {"expert_weights_scale": 2.0}, r"know, .*: hunyuan-moe\.expert_weights_scale"),
        ("exaone_moe", {"expert_shared_count": 2}, "the 2 experts that all tokens ask have 32 rows together"),
        ("olmo", {"attention.layer_norm_epsilon": 1e-6}, r"olmo\.attention\.layer_norm_epsilon is 1e-06"),
        ("nemotron", {"rope.dimension_count": 9}, "turns 9 of 8 dimensions of a head"),
        ("gpt_neox", {"attention.head_count_kv": 2}, r"attn_qkv\.weight' is \(96, 32\), the header says 64 x 32"),
        ("minicpm3-long", "rope_factors_short.weight", r"no tensor 'rope_factors_short\.weight'"),
        ("stablelm-parallel", "blk.2.attn_q_norm.weight", r"no tensor 'blk\.2\.attn_q_norm\.weight'"),
    ],
)  # fmt: skip
def test_a_setting_that_is_not_understood_and_a_lacking_tensor_are_named(name, more, message, converted, load):
    settings = more if isinstance(more, dict) else {}
    with pytest.raises(BadModel, match=message):
        load(converted(name, lambda stored, x: None if stored == more else x, more=settings))


def test_what_has_no_place_or_another_shape_is_refused(converted, load):
    with pytest.raises(BadModel, match=r"1 tensors of .*\.gguf have no place in the model: blk\.0\.ffn_gate_inp"):
        load(converted("stablelm", extra={"blk.0.ffn_gate_inp.weight": torch.ones(4, 32)}))
    with pytest.raises(BadModel, match=r"k_proj\.weight is \[14, 32\] and should be \[16, 32\]"):
        load(converted("stablelm", lambda stored, x: x[:-2] if "blk.1.attn_k." in stored else x))
    with pytest.raises(BadModel, match="in one tensor: convert it without --fuse-qkv"):
        load(converted("stablelm", extra={"blk.0.attn_qkv.weight": torch.ones(64, 32)}))
    with pytest.raises(BadModel, match=r"rope_freqs\.weight and .* do not tell how 32 dimensions turn"):
        load(converted("gemma4_text", lambda stored, x: x * 2 if stored == "rope_freqs.weight" else x))
    with pytest.raises(BadModel, match=r"per_layer_token_embd\.weight has 126 rows for 128 tokens"):
        load(converted("gemma4_text", lambda stored, x: x[:-2] if stored == "per_layer_token_embd.weight" else x))
