"""Latent attention: what test_architectures.py, which compares it with Transformers, does not show."""

import copy
from dataclasses import replace

import gguf
import pytest
import torch
import transformers
from differences import difference
from gguf.quants import dequantize, quantize
from transformers_types import DEFAULT_ROPE, LATENT, LATENTS

from gpu_worker.models.checkpoint.weights import FLOATS, SafetensorsSource
from gpu_worker.models.decoders.config import LlamaConfig
from gpu_worker.models.decoders.latent.latent_source import LatentBlockSource, in_halves
from gpu_worker.models.packed import packed_cache
from gpu_worker.ops import native
from gpu_worker.ops.reference import ReferenceOps
from gpu_worker.running import loading
from octavo.request.errors import BadModel, InvalidArgument

TOKENS, ENDS = [(7 * i + 3) % 128 for i in range(60)], (1, 17, 24, 25, 26)
WIDE = {**LATENT, "hidden_size": 64, "q_lora_rank": 32, "qk_nope_head_dim": 32}
extended = pytest.mark.skipif(native.load() is None, reason="the extension was not built")


@pytest.fixture
def reference(monkeypatch, load):
    """Loads a model on the reference ops."""

    def load_reference(model, **options):
        with monkeypatch.context() as patch:
            patch.setattr(loading, "choose_ops", lambda *_: ReferenceOps())
            return load(model, **options)

    return load_reference


@extended
@pytest.mark.parametrize("name", LATENTS)
def test_a_step_in_one_call_computes_what_its_ops_do(name, tiny, load, reference, all_logits):
    model = tiny(name).directory
    runner = load(model)
    assert runner._decoder.name.startswith("llama in one call") == (name != "deepseek_v2-odd")
    assert difference(all_logits(runner, TOKENS, ENDS), all_logits(reference(model), TOKENS, ENDS)) < 1e-5


@extended
def test_threads_need_not_divide_the_heads(tiny, load, all_logits):
    """A group of heads for each thread, of the same number."""
    model = tiny("deepseek_v3").directory
    expected = all_logits(load(model, threads=1), TOKENS, ENDS)
    assert torch.equal(all_logits(load(model, threads=3), TOKENS, ENDS), expected)


@extended
def test_a_step_of_many_tokens_has_the_bits_of_its_pieces(tiny, load, all_logits, tmp_path):
    """So many that products of heads take them in two slabs."""
    tokens = (TOKENS * 5)[:290]
    model = tiny("latent-long", "Youtu", {**WIDE, "max_position_embeddings": 512}).model
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    runner = load(tmp_path / "half", dtype="bfloat16")
    assert torch.equal(all_logits(runner, tokens), all_logits(runner, tokens, (150,)))


def test_pages_hold_one_vector_for_all_heads(tiny, load):
    info = load(tiny("deepseek_v3").directory)._decoder
    assert (info.num_kv_heads, info.head_dim) == (1, 8 + 32)


def test_kimi_k2_is_deepseek_v3_by_another_name(tiny, altered, load, all_logits):
    logits = all_logits(load(altered("deepseek_v3", model_type="kimi_k2")), TOKENS)
    assert torch.equal(logits, all_logits(load(tiny("deepseek_v3").directory), TOKENS))


def rounded(model, scheme):
    """The model with its matrices rounded, of heads to 8 bits, where keys lie the other way round."""
    copied = copy.deepcopy(model)
    for name, weight in copied.named_parameters():
        if weight.dim() < 2:
            continue
        eight = scheme.startswith("q8") or "embed" in name or "lm_head" in name or "kv_b" in name
        kind = gguf.GGMLQuantizationType.Q8_0 if eight else gguf.GGMLQuantizationType.Q4_0

        def whole(rows, kind=kind):
            rows = rows.detach().contiguous()
            return torch.from_numpy(dequantize(quantize(rows.numpy(), kind), kind)).view(rows.shape)

        if "kv_b" in name:
            keys, values = weight.unflatten(0, (4, -1)).split((32, 16), dim=1)
            keys = whole(keys.transpose(1, 2)).transpose(1, 2)
            weight.data.copy_(torch.cat((keys, whole(values)), dim=1).flatten(0, 1))
        else:
            weight.data.copy_(whole(weight))
    return copied


@extended
@pytest.mark.parametrize(("scheme", "most"), [("q8", 0.01), ("q4", 0.01), ("q8-a8", 0.3)])
def test_matrices_are_rounded(scheme, most, tiny, load, all_logits, monkeypatch, tmp_path):
    """Beside a model with the rounded numbers. What is left are the inputs. A second start finds matrices packed."""
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)
    model = tiny("latent-wide", "Youtu", WIDE)
    with torch.inference_mode():
        expected = rounded(model.model, scheme)(torch.tensor([TOKENS]), use_cache=False).logits[0]
    options = {"quantization": scheme, "packed_cache": str(tmp_path / "packed")}
    logits = all_logits(load(model.directory, **options), TOKENS, ENDS)
    assert 0 < difference(logits, expected) < most
    assert difference(expected, model.logits(TOKENS)) > most / 4
    (kept,) = (tmp_path / "packed").glob("*.packed")
    written = kept.stat().st_ino
    assert torch.equal(all_logits(load(model.directory, **options), TOKENS, ENDS), logits)
    assert kept.stat().st_ino == written


@extended
def test_weights_stored_in_16_bits_stay_so(tiny, load, reference, all_logits, tmp_path):
    copy.deepcopy(tiny("deepseek_v3").model).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    runner = load(tmp_path / "half")
    assert "bf16" in runner._decoder.name
    assert difference(all_logits(runner, TOKENS, ENDS), all_logits(reference(tmp_path / "half"), TOKENS, ENDS)) < 1e-5


def test_keys_that_lie_the_other_way_round_are_no_blocks_any_more(tiny):
    """Values are, and rows of queries and of latents are blocks in another order."""
    model = tiny("deepseek_v2-lite")
    config = LlamaConfig.from_dict(model.model.config.to_dict())
    stored = SafetensorsSource(model.directory)

    class Blocks:
        """Each row is a block of its numbers."""

        names, get = stored.names, stored.get

        def block_format(self, name: str) -> str:
            return "q8"

        def shape(self, name: str) -> tuple[int, ...]:
            return tuple(stored.get(name).shape)

        def blocks(self, name: str) -> torch.Tensor:
            return stored.get(name).contiguous().view(torch.uint8)

    source = in_halves(Blocks(), config.num_heads, config.latent)
    assert isinstance(source, LatentBlockSource)
    at = "model.layers.1.self_attn."
    keys, values = f"{at}k_b_proj.weight", f"{at}v_b_proj.weight"
    assert [source.block_format(name) for name in (keys, values, f"{at}q_proj.bias")] == ["", "q8", FLOATS]
    assert not source.get(f"{at}q_proj.bias").any()
    for name in (values, f"{at}q_proj.weight", f"{at}kv_a_proj_with_mqa.weight", f"{at}o_proj.weight"):
        assert torch.equal(source.blocks(name).view(torch.float32), source.get(name).contiguous())
    for name in (keys, values):
        assert source.shape(name) == tuple(source.get(name).shape)
    assert f"{at}kv_b_proj.weight" not in source.names()


def test_a_matrix_that_is_not_that_of_its_sizes_is_named(tiny):
    model = tiny("deepseek_v3")
    sizes = replace(LlamaConfig.from_dict(model.model.config.to_dict()).latent, plain=8)
    source = in_halves(SafetensorsSource(model.directory), 4, sizes)
    says = r"kv_b_proj.weight' is \(192, 32\), the configuration says \(160, 32\) \(num_attention_heads, qk_nope_"
    for half in "kv":
        with pytest.raises(BadModel, match=says):
            source.get(f"model.layers.0.self_attn.{half}_b_proj.weight")


def test_adapters_are_refused(tiny, load):
    decoder = load(tiny("deepseek_v3").directory)._decoder
    assert decoder.load_lora is None
    assert "latent attention" in decoder.lora_support.refusal


def test_weights_kept_on_a_gpu_are_refused_with_what_to_say(tiny, load):
    with pytest.raises(InvalidArgument, match=r"quantization: kept .*latent attention.*: say auto"):
        load(tiny("deepseek_v3").directory, quantization="kept")


@extended
def test_sizes_that_are_not_rounded_are_named(tiny, load):
    with pytest.raises(InvalidArgument, match=r"^quantization: q8 .* 24 \(kv_lora_rank\) .* multiples of 16: say auto"):
        load(tiny("deepseek_v2-odd").directory, quantization="q8")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("deepseek_v2", {"rope_interleave": False}),
        ("deepseek_v3", {"rope_parameters": {**DEFAULT_ROPE, "factor": 4.0, "mscale_all_dim": 0.9}}),
        *((name, {"use_sliding_window": True, "sliding_window": 9}) for name in ("deepseek_v3", "minicpm3", "youtu")),
        ("youtu", {"mlp_bias": True}),
    ],
)
def test_settings_that_transformers_ignores(name, fields, tiny, altered, load, reference, all_logits):
    model, changed = tiny(name).directory, altered(name, **fields)
    for load_on in (load, reference):
        assert torch.equal(all_logits(load_on(changed), TOKENS), all_logits(load_on(model), TOKENS))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(changed)
    with torch.inference_mode():
        found = theirs(torch.tensor([TOKENS]), use_cache=False).logits[0]
    assert torch.equal(found, tiny(name).logits(TOKENS))


def test_a_way_to_choose_experts_that_is_not_known_is_refused(altered, load):
    with pytest.raises(BadModel, match="topk_method is 'noaux_tc', and 'greedy' and 'group_limited_greedy' are read"):
        load(altered("deepseek_v2", topk_method="noaux_tc"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"qk_rope_head_dim": 7}, r"heads of 16 and 7 \(qk_nope_head_dim, qk_rope_head_dim\)"),
        ({"kv_lora_rank": 0}, r"latents of 0 \(kv_lora_rank\)"),
        ({"kv_lora_rank": 1 << 20}, "head_dim is 1048584"),
        ({"kv_lora_rank": 16}, r"tensor .* the configuration says"),
        ({"v_head_dim": 8}, r"the configuration says"),
        ({"qk_nope_head_dim": 8}, r"the configuration says"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "4 of 8 dimensions turn"),
    ],
)
def test_sizes_that_are_not_those_of_the_tensors_are_refused(more, message, altered, load):
    with pytest.raises(BadModel, match=message):
        load(altered("deepseek_v3", **more))
