"""GGUF files of models with recurrent layers run as the directories do that they were made of."""

import gguf
import pytest
import torch
from differences import difference
from effort import diagonal
from gguf_models import encoded
from gguf_recurrent import MODELS
from instruction_sets import OPS

from gpu_worker.models.packed.packed_linear import READ_BY_OTHERS, PackedLinear
from gpu_worker.ops import native
from octavo.request.errors import BadModel

PROMPT = [(7 * i + 3) % 128 for i in range(50)]
# Small delta nets with experts, whose logits move by so much when sums are made in another order.
SENSITIVE = dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), 3e-4)


@pytest.fixture
def made(tiny):
    return lambda name: tiny(f"recurrent {name}", *MODELS[name])


@pytest.mark.parametrize(("name", "on_ops"), diagonal(list(MODELS), OPS), indirect=["on_ops"])
@pytest.mark.usefixtures("on_ops")
def test_a_file_runs_as_its_directory(name, made, converted, load, all_logits):
    """In one piece and in several: what is stored again is what the layers remember."""
    model, runner = made(name), load(converted(name))
    expected = all_logits(load(model.directory), PROMPT)
    assert difference(all_logits(runner, PROMPT), expected) < 1e-5
    assert difference(all_logits(runner, PROMPT, (7, 8, 30)), expected) < 1e-4
    assert difference(expected, model.logits(PROMPT)) < 1e-3, "whose delta rules take many tokens at once"


@pytest.mark.skipif(native.load() is None, reason="the extension was not built")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("qwen3_5_text", "Q8_0"), ("qwen3_5_text", "Q4_0"), ("qwen3_5-even", "Q4_0"), ("qwen3_5_moe_text", "Q8_0")),
        *(("qwen3_next", "Q8_0"), ("lfm2", "Q4_0"), ("lfm2_moe", "Q8_0"), ("granitemoehybrid", "Q4_0")),
        *(("granitemoehybrid-dense", "Q8_0"), ("falcon_h1-scaled", "Q4_0"), ("jamba", "Q8_0"), ("bamba", "Q4_0")),
        *(("nemotron_h", "Q8_0"), ("nemotron_h-moe", "Q8_0"), ("kimi_linear", "Q8_0")),
        *(("mamba", "Q8_0"), ("mamba2", "Q4_0")),
    ],
)
def test_layers_run_on_the_numbers_of_the_file(name, kind, made, converted, load, all_logits):
    """Beside a file of floats with the same numbers. What is rounded then are inputs, by `auto`."""

    def is_rounded(stored, tensor):
        return tensor.squeeze().dim() > 1 and tensor.shape[-1] % 32 == 0 and "ssm_a" not in stored

    def rounded(stored, tensor):
        return encoded(tensor.contiguous().numpy(), kind)[1] if is_rounded(stored, tensor) else tensor

    own = gguf.GGMLQuantizationType[kind]
    expected = all_logits(load(converted(name, rounded)), PROMPT)
    path = converted(name, kind=lambda stored, x: own if is_rounded(stored, x) else gguf.GGMLQuantizationType.F32)
    fast, exact = load(path), load(path, quantization="none")
    assert difference(all_logits(exact, PROMPT), expected) < SENSITIVE.get(name, 2e-5)
    assert difference(all_logits(fast, PROMPT), expected) < 0.05
    assert difference(expected, made(name).logits(PROMPT)) > 1e-4
    layers = {each: module for each, module in exact._decoder._model.named_modules() if "proj" in each}
    wide = {each for each, module in layers.items() if getattr(module, "in_features", 1) % 32 == 0}
    wide = {each for each in wide if each.rpartition(".")[2] not in READ_BY_OTHERS}
    packed = {each for each, module in layers.items() if isinstance(module, PackedLinear)}
    small = {each for each in wide if layers[each].out_features < 16}
    assert wide - small == packed


def test_layers_that_draft_tokens_are_not_read(made, converted, load, all_logits):
    name = "qwen3_5_text"
    last = {f"blk.4.{part}.weight": torch.ones(32) for part in ("attn_norm", "nextn.enorm", "nextn.hnorm")}
    last |= {"blk.4.attn_k.weight": torch.ones(32, 32), "blk.4.nextn.eh_proj.weight": torch.ones(32, 64)}
    recurrent = [True, True, True, False, False]
    more = {"block_count": 5, "nextn_predict_layers": 1, "attention.recurrent_layers": recurrent}
    expected = all_logits(load(converted(name)), PROMPT)
    assert torch.equal(all_logits(load(converted(name, more=more, extra=last)), PROMPT), expected)
    silent = {"attention.recurrent_layers": None, "full_attention_interval": None}
    assert torch.equal(all_logits(load(converted(name, more=silent)), PROMPT), expected)


def test_early_files_of_qwen3_next_have_projections_in_one_tensor(made, converted, load, all_logits):
    name, parts = "qwen3_next", ("attn_qkv", "attn_gate")
    tensors = made(name).model.state_dict()
    ends = ((layer, f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight") for layer in range(3))
    extra = {f"blk.{layer}.ssm_in.weight": tensors[end] for layer, end in ends}
    early = converted(name, lambda stored, x: None if any(part in stored for part in parts) else x, extra=extra)
    assert torch.equal(all_logits(load(early), PROMPT), all_logits(load(converted(name)), PROMPT))


def test_a_file_of_nemotron_h_may_speak_of_experts_that_it_has_not(made, converted, load, all_logits):
    """llama.cpp's converter writes so of directories that Transformers has saved."""
    unsaid = {"expert_count": 8, "expert_used_count": 2, "expert_weights_norm": True, "expert_group_count": 1}
    path = converted("nemotron_h", more=unsaid, arch="nemotron_h_moe")
    assert difference(all_logits(load(path), PROMPT), all_logits(load(made("nemotron_h").directory), PROMPT)) < 1e-5


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("qwen3_5_text", {"ssm.group_count": 3}, "3 heads of 16 keys for 4 of values"),
        ("qwen3_5_text", {"ssm.inner_size": 95}, "95 values are not 4 heads"),
        ("qwen3_5_text", {"attention.recurrent_layers": [True]}, "does not say which layers attend"),
        ("qwen3_5_text", {"nextn_predict_layers": 4}, "4 of 4 layers draft tokens"),
        ("qwen3_5_text", {"ssm.dt_b_c_rms": True}, r"does not know, .*: qwen35\.ssm\.dt_b_c_rms"),
        ("qwen3_5_text", {"rope.dimension_count": 64}, "turns 64 of 16 dimensions"),
        ("qwen3_5_text", "blk.1.ssm_a", r"no tensor 'blk\.1\.ssm_a'"),
        ("qwen3_5_text", "blk.2.ssm_conv1d.weight", r"lacks: model\.layers\.2\.linear_attn\.conv1d\.weight"),
        ("qwen3_5_moe_text", {"expert_weights_scale": 2.0}, r"does not know, .*: qwen35moe\.expert_weights_scale"),
        ("lfm2", {"attention.sliding_window": 8}, r"does not know, .*: lfm2\.attention\.sliding_window"),
        ("lfm2", {"attention.head_count_kv": [0, 0, 0, 0]}, "head_count_kv is 0"),
        ("lfm2", {"shortconv.l_cache": 4}, r"conv\.conv\.weight is \[32, 1, 3\] and should be \[32, 1, 4\]"),
        ("lfm2_moe", {"expert_gating_func": 1}, "expert_gating_func is not that of a sigmoid"),
        ("lfm2_moe", {"leading_dense_block_count": 4}, "4 of 4 layers have no experts"),
        ("granitemoehybrid", {"rope.scaling.finetuned": True}, "is no Bamba, turns 8 of 8 dim.* has experts"),
        ("bamba", {"rope.dimension_count": 2}, "turns 2 of 8 dimensions"),
        ("bamba", {"attention.scale": 0.5}, r"does not know, .*: granitehybrid\.attention\.scale"),
        ("kimi_linear", {"kda.head_dim": 24}, "heads of 24 are not those of its tensors .*: use a directory"),
        ("kimi_linear", {"attention.key_length_mla": 32}, "heads of 32 and 16, latents of 32 and 8"),
        ("kimi_linear", {"attention.head_count_kv": [0, 1, 0, 1]}, "are not those without convolutions"),
        ("kimi_linear", {"leading_dense_block_count": 4}, "4 of 4 layers have no experts"),
        ("kimi_linear", {"expert_shared_count": 3}, "the 3 experts .* have 32 rows together: use a directory"),
        ("kimi_linear", {"expert_gating_func": 1}, "expert_gating_func is not that of a sigmoid"),
        ("kimi_linear", "blk.1.ssm_f_b.weight", r"lacks: model\.layers\.1\.self_attn\.forget_gate\.f_b_proj"),
        ("nemotron_h", "blk.2.ffn_up.weight", r"layer 2 is not one of .*mlp: \[\]: use a directory"),
        ("nemotron_h-moe", {"expert_gating_func": 1}, "expert_gating_func is not that of a sigmoid"),
        ("nemotron_h-moe", {"expert_used_count": 9}, "9 of 8 experts"),
        ("nemotron_h-latent", {"moe_latent_size": None}, "moe_latent_size is 0, its tensors say other"),
        ("nemotron_h-latent", {"expert_group_used_count": None}, "how many groups of experts .*: use a directory"),
        ("nemotron_h-moe", "blk.1.ffn_down_exps.weight", r"no tensor 'blk\.1\.ffn_down_exps\.weight'"),
        ("granitemoehybrid", {"ssm.time_step_rank": 7}, "64 channels of a scan .* are not whole parts of 7"),
        ("falcon_h1", {"ssm.time_step_rank": 0}, "64 channels of a scan .* are not whole parts of 0"),
        ("mamba2", {"ssm.inner_size": 60}, "60 channels of a scan .* are not whole parts of 32"),
        ("mamba", {"ssm.group_count": 2}, r"does not know, .*: mamba\.ssm\.group_count"),
        ("jamba", {"attention.head_count_kv": [2, 2, 0, 2]}, "are not at equal distances"),
        ("jamba", "blk.3.ffn_up_exps.weight", r"no tensor 'blk\.3\.ffn_up_exps\.weight'"),
    ],
)  # fmt: skip
def test_a_setting_that_is_not_understood_and_a_lacking_tensor_are_named(name, more, message, converted, load):
    settings = more if isinstance(more, dict) else {}
    with pytest.raises(BadModel, match=message):
        load(converted(name, lambda stored, x: None if stored == more else x, more=settings))
