"""GPT-like decoders: what test_architectures.py does not show of GPT-2, GPT-J, BLOOM, Falcon, MPT and their like."""

from importlib import import_module

import pytest
import torch
import transformers
from differences import difference
from effort import some
from safetensors.torch import load_file
from torch import nn

from gpu_worker.models.decoders.gpt import alibi_slopes
from gpu_worker.models.decoders.gpt_families import read_gpt_config
from octavo.request.errors import BadModel

KINDS = ["gpt2", "gptj", "codegen", "gpt-neo", "bloom", "falcon-7b", "falcon-40b", "falcon-11b", "falcon-rw", "mpt"]
TOKENS = [(7 * i + 3) % 128 for i in range(50)]


def test_gpt_sw3_is_a_gpt2_by_another_name(tiny, altered, load, all_logits):
    ours, gpt2 = load(altered("gpt2", model_type="gpt-sw3")), load(tiny("gpt2").directory)
    assert torch.equal(all_logits(ours, TOKENS), all_logits(gpt2, TOKENS))
    assert ours._decoder.name == gpt2._decoder.name


def modeling(name):
    """A module of Transformers, which takes seconds to import."""
    return import_module(f"transformers.models.{name}.modeling_{name}")


def test_slopes_are_those_of_transformers():
    for heads in (*range(1, 33), 40, 71, 112):
        bloom = modeling("bloom").build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
        mpt = -modeling("mpt").build_mpt_alibi_tensor(heads, 2, 16).view(heads, 2)[:, 0]
        for ours, theirs in ((alibi_slopes(heads), bloom), (alibi_slopes(heads, 16), mpt)):
            torch.testing.assert_close(torch.tensor(ours), theirs, rtol=1e-6, atol=0)
    # Falcon's are rounded and scaled. Without a power of two, slopes are no numbers of bfloat16.
    config = transformers.FalconConfig(hidden_size=96, num_attention_heads=12, alibi=True, multi_query=False)
    falcon = modeling("falcon").build_alibi_tensor(torch.ones(1, 2), 12, torch.float32)[:, 0, 1] * 8**-0.5
    assert torch.equal(torch.tensor(read_gpt_config(config.to_dict()).alibi), falcon)
    assert not torch.equal(torch.tensor(alibi_slopes(12)) * 8**-0.5, falcon)


# Settings of MPT that Transformers reads and then ignores. The reference is its model with these parts put in.

MPT = {"vocab_size": 128, "max_seq_len": 128, "d_model": 48, "n_layers": 2, "n_heads": 6}


def add_biases(model):
    for module in model.transformer.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.bias = nn.Parameter(0.2 * torch.randn(module.weight.shape[0]))


def add_norms(model):
    def norm(module, _, output):
        queries, keys, values = output.chunk(3, dim=-1)
        return torch.cat((module.norms[0](queries), module.norms[1](keys), values), dim=-1)

    for block in model.transformer.blocks:
        block.attn.q_ln, block.attn.k_ln = (nn.LayerNorm(48, bias=False) for _ in range(2))
        for part in (block.attn.q_ln, block.attn.k_ln):
            part.weight.data.uniform_(0.5, 1.5)
        object.__setattr__(block.attn.Wqkv, "norms", (block.attn.q_ln, block.attn.k_ln))  # not parts of Wqkv
        block.attn.Wqkv.register_forward_hook(norm)


def steepen(model):
    build = modeling("mpt").build_mpt_alibi_tensor
    model.transformer.build_mpt_alibi_tensor = lambda heads, length, device: build(heads, length, 16)


def learn_positions(model):
    table = model.transformer.wpe = nn.Embedding(128, 48)
    model.transformer.wte.register_forward_hook(lambda _, ids, found: found + table.weight[: found.shape[1]])
    model.transformer.build_mpt_alibi_tensor = lambda heads, length, device: torch.zeros(heads, 1, length)


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({"no_bias": False}, add_biases),
        ({"attn_config": {"qk_ln": True}}, add_norms),
        ({"attn_config": {"alibi_bias_max": 16}}, steepen),
        ({"attn_config": {"alibi": False}}, learn_positions),
    ],
    ids=["biases", "norms of queries and keys", "alibi_bias_max", "learned positions"],
)
def test_an_mpt_is_what_its_configuration_says(settings, change, tmp_path, load, all_logits):
    torch.manual_seed(5)
    model = transformers.MptForCausalLM(transformers.MptConfig(**MPT, **settings)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    with torch.inference_mode():
        plain = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
        change(model)
        expected = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    model.save_pretrained(tmp_path / "model")
    logits = all_logits(load(tmp_path / "model"), TOKENS)
    assert difference(logits, expected) < 1e-4
    assert float((plain - expected).abs().max()) > 0.01, "the setting changes nothing"


@pytest.mark.parametrize("name", some(KINDS, {"gpt2", "codegen", "gpt-neo", "falcon-11b", "mpt"}))
def test_a_tensor_too_few_or_too_many_is_refused(name, altered, load):
    weights = sorted(load_file(altered(name) / "model.safetensors"))
    extra = next(stored for stored in weights if ".1." in stored) + "_extra"
    with pytest.raises(BadModel, match=f"have no place in the model: {extra}"):
        load(altered(name, lambda weights: weights.update({extra: torch.zeros(2)})))
    for missing in (stored for stored in weights if ".1." in stored or "h." not in stored):
        with pytest.raises(BadModel, match=missing.removeprefix("transformer.")):
            load(altered(name, lambda weights, missing=missing: weights.pop(missing)))


def test_a_base_model_without_a_head_runs(tiny, altered, load, greedy):
    """As BLOOM and GPT-2 are published: without the name of the base model before each tensor."""

    def rename(weights):
        for name in list(weights):
            weights[name.removeprefix("transformer.")] = weights.pop(name)

    expected = greedy(load(tiny("bloom").directory), [[1, 2, 3]], 8)
    assert greedy(load(altered("bloom", rename)), [[1, 2, 3]], 8) == expected


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type 'multiquery_attention'"),
        ("mpt", {"attn_config": {"prefix_lm": True}}, "prefix_lm True is not supported"),
        ("mpt", {"attn_config": {"rope": True}}, "rope True is not supported"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale 'inv_sqrt_d_model'"),
        ("mpt", {"norm_type": "rmsnorm"}, "norm_type 'rmsnorm'"),
        ("mpt", {"ffn_config": {"ffn_type": "mptglu"}}, "ffn_type 'mptglu'"),
        ("mpt", {"expansion_ratio": 2}, "the configuration says"),
        ("falcon-7b", {"activation": "mish"}, "activation 'mish' is not one of"),
        ("falcon-7b", {"rope_parameters": {"rope_type": "proportional"}}, "rope_type 'proportional' is not one of"),
        ("falcon-7b", {"num_attention_heads": 3}, "3 heads and 1 key-value heads for 32 numbers"),
        ("falcon-40b", {"num_kv_heads": 3}, "4 heads and 3 key-value heads"),
        ("gptj", {"rotary_dim": None}, "TypeError"),
        ("gptj", {"rotary_dim": 10}, "rotary_dim 10"),
        ("codegen", {"n_head": 2, "rotary_dim": 8}, "2 heads are no multiple of 4"),
        ("gpt-neo", {"attention_types": [[["global"], 3]]}, "lists global, global, global for 4 layers"),
        ("gpt-neo", {"attention_types": None}, "TypeError"),
        ("bloom", {"hidden_size": None}, "has no 'hidden_size or n_embd"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name, fields, reason, altered, load):
    with pytest.raises(BadModel, match=reason):
        load(altered(name, **fields))
