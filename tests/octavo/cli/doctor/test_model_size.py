"""What `octavo doctor` says of a model's size, from files whose numbers are known."""

import json

import pytest
from gguf_models import write_bare

from gpu_worker.models.packed.packed_linear import CHOOSING, READ_BY_OTHERS
from octavo.cli.doctor import model_size

CONFIG = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
CONFIG |= {"hidden_size": 512, "num_hidden_layers": 10}
RECURRENT = ["linear_attention", "linear_attention", "mamba", "conv", "full_attention"] * 2


def write_folder(path, config, shapes, dtype="BF16"):
    """A folder whose safetensors file has a header alone."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        num_bytes = 2 * shape[0] * shape[1]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_a_folder_may_be_kept_in_several_ways(tmp_path, monkeypatch):
    monkeypatch.setattr(model_size, "read_rate", lambda: 10e9)
    report = model_size.size(write_folder(tmp_path, CONFIG, {"a": [32768, 1024], "lm_head.weight": [32768, 1024]}))
    assert report.result == "ok"
    for said in (
        "67 million numbers",
        "128 MiB, 128 MiB with --dtype bfloat16, 68 MiB with --quantization q8, 52 MiB with --quantization q4",
        "keys and values 10 KiB a token",
        "about 74.5, 74.5, 140, 183 tokens/s",
    ):
        assert said in report.detail


@pytest.mark.parametrize(
    ("change", "said", "unsaid"),
    [
        ({"model_type": "gpt2"}, "256 MiB, 128 MiB with --dtype bfloat16;", "q4"),
        ({"num_local_experts": 8}, "depends on how many experts", "tokens/s"),
        ({"num_attention_heads": None}, "128 MiB", "keys and values"),
        ({"text_config": {"num_hidden_layers": 2}}, "keys and values 2 KiB a token", "10 KiB"),
        ({"kv_lora_rank": 448, "qk_rope_head_dim": 64}, "keys and values 40 KiB a token", "10 KiB"),
        ({"layer_types": RECURRENT}, "keys and values 2 KiB a token", "10 KiB"),
    ],
)
def test_nothing_is_said_that_does_not_hold(tmp_path, change, said, unsaid):
    report = model_size.size(write_folder(tmp_path, CONFIG | change, {"a": [65536, 1024]}))
    assert said in report.detail and unsaid not in report.detail


def test_layers_of_other_models_may_be_rounded(tmp_path):
    """Those that stay in floats beside them are whole: norms, what chooses experts, experts in one tensor."""
    shapes = {"layers.0.up_proj.weight": [1024, 1024], "embed_tokens.weight": [1024, 1024]}
    shapes |= {"layers.0.gate.weight": [256, 1024], "layers.0.odd.weight": [256, 1024 + 8]}
    detail = model_size.size(write_folder(tmp_path, CONFIG | {"model_type": "opt"}, shapes)).detail
    assert "weights take 10 MiB, 5 MiB with --dtype bfloat16, 4 MiB with --quantization q8, 4 MiB with" in detail
    for name in CHOOSING | READ_BY_OTHERS:
        shapes = {f"layers.0.self_attn.{name}.weight": [1024, 1024]}
        detail = model_size.size(write_folder(tmp_path, CONFIG | {"model_type": "opt"}, shapes)).detail
        assert "4 MiB with --quantization q8, 4 MiB with --quantization q4" in detail, name


def test_of_a_model_that_reads_more_the_text_alone_counts(tmp_path):
    config = CONFIG | {"model_type": "llava", "text_config": {"model_type": "llama"}}
    shapes = {"model.language_model.layers.0.up_proj.weight": [32768, 1024], "lm_head.weight": [32768, 1024]}
    shapes["model.vision_tower.layers.0.up_proj.weight"] = [65536, 1024]
    assert "67 million numbers; weights take 128 MiB," in model_size.size(write_folder(tmp_path, config, shapes)).detail
    pictures = {"model_type": "qwen2_vl", "text_config": {"model_type": "qwen2_vl_text"}}
    shapes["model.visual.blocks.0.mlp.up_proj.weight"] = shapes.pop("model.vision_tower.layers.0.up_proj.weight")
    detail = model_size.size(write_folder(tmp_path, CONFIG | pictures, shapes)).detail
    assert "134 million numbers; weights take 384 MiB" in detail and "324 MiB with --quantization q8, 308 MiB" in detail


def test_a_token_reads_the_experts_it_asks_and_a_row_of_the_embedding(tmp_path, monkeypatch):
    monkeypatch.setattr(model_size, "read_rate", lambda: 10e9)
    shapes = {
        "embed_tokens.weight": [8192, 1024],
        "lm_head.weight": [8192, 1024],
        "a.experts.0.w1.weight": [65536, 1024],
    }
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    report = model_size.size(write_folder(tmp_path, CONFIG | experts | {"model_type": "mixtral"}, shapes))
    assert "weights take 160 MiB," in report.detail
    assert "about 199, 199, " in report.detail and "each of which asks 0.25 of the experts" in report.detail


@pytest.mark.parametrize(
    ("settings", "named", "says"),
    [
        (
            {"quant_method": "awq"},
            {"a.qweight": [1024, 8192], "a.qzeros": [99, 99]},
            "67 million numbers; weights take 40 MiB;",
        ),
        (
            {"quant_method": "gptq", "bits": 8, "sym": True},
            {"a.qweight": [1024, 8192]},
            "34 million numbers; weights take 34 MiB;",
        ),
        ({"quant_method": "gptq", "desc_act": True}, {"a.qweight": [1024, 8192]}, "weights take 256 MiB;"),
        (
            {"quant_method": "fp8"},
            {"a.weight": [1024, 8192]},
            "weights take 32 MiB, 16 MiB with --dtype bfloat16, 8 MiB",
        ),
    ],
)
def test_numbers_in_words_are_counted_as_they_are_kept(settings, named, says, tmp_path):
    dtype = "F8_E4M3" if settings["quant_method"] == "fp8" else "I32"
    assert (
        says in model_size.size(write_folder(tmp_path, CONFIG | {"quantization_config": settings}, named, dtype)).detail
    )


def test_a_model_that_is_too_large_in_every_way_is_bad(tmp_path, monkeypatch):
    name = write_folder(tmp_path, CONFIG, {"a": [65536, 1024]})
    monkeypatch.setattr(model_size, "available_bytes", lambda: 30 << 20)
    report = model_size.size(name)
    assert (report.result, report.fix) == ("bad", "use a smaller model, or a file with fewer bits")
    monkeypatch.setattr(model_size, "available_bytes", lambda: 40 << 20)
    assert model_size.size(name).result == "ok"


def test_a_gguf_file_is_kept_as_it_is():
    report = model_size.size("smollm2")
    assert "135 million numbers; weights take 92 MiB; keys and values 45 KiB a token" in report.detail


def test_of_layers_with_different_keys_the_one_with_most_counts(tmp_path):
    heads = {"attention.head_count_kv": [1, 4, 1]}
    path = write_bare(tmp_path / "x.gguf", "gemma4", 3, {"token_embd": (64, 64)}, **heads)
    assert "keys and values 3 KiB a token" in model_size.size(str(path)).detail


def test_experts_of_a_file_through_transformers_are_kept_as_they_are(tmp_path):
    """Blocks of MXFP4 are rounded."""
    shapes = {"token_embd": (64, 64), "blk.0.ffn_up_exps": (8, 1024, 1024)}
    for kind, held in (("Q8_0", 9), ("MXFP4", 9), ("Q4_0", 5), ("F16", 32)):
        path = write_bare(tmp_path / f"{kind}.gguf", "granitemoe", 2, shapes, kind)
        assert f"weights take {held} MiB" in model_size.size(str(path)).detail, kind


def test_latents_of_a_file_are_kept_as_they_are_and_all_heads_have_one(tmp_path):
    shapes = {"token_embd": (64, 64), "blk.0.attn_k_b": (4, 512, 512), "blk.0.attn_v_b": (4, 512, 512)}
    latents = {"attention.kv_lora_rank": 96, "rope.dimension_count": 32, "attention.head_count_kv": 4}
    for kind, held in (("Q8_0", 2), ("Q4_0", 1), ("F16", 4)):
        path = write_bare(tmp_path / f"{kind}.gguf", "deepseek2", 2, shapes, kind, **latents)
        detail = model_size.size(str(path)).detail
        assert f"weights take {held} MiB; keys and values 2 KiB a token" in detail, kind


def test_keys_of_latents_are_rounded_where_a_file_has_them_with_the_values(tmp_path):
    """They lie the other way round."""
    latents = {"attention.kv_lora_rank": 512, "rope.dimension_count": 8, "attention.value_length": 72}
    shapes = {"token_embd": (64, 64), "blk.0.attn_kv_b": (4 * (24 + 72), 1 << 15)}
    for kind, held in (("Q8_0", 13), ("Q4_0", 8), ("F16", 24)):
        path = write_bare(tmp_path / f"{kind}.gguf", "minicpm3", 1, shapes, kind, **latents)
        assert f"weights take {held} MiB" in model_size.size(str(path)).detail, kind


def test_latents_of_a_file_through_transformers_are_decoded(tmp_path):
    shapes = {"token_embd": (64, 64), "blk.0.attn_k_b": (4, 512, 512), "blk.0.attn_v_b": (4, 512, 512)}
    latents = {"attention.kv_lora_rank": 96, "rope.dimension_count": 32, "attention.head_count_kv": 4}
    path = write_bare(tmp_path / "x.gguf", "kimi-linear", 2, shapes, "Q8_0", **latents)
    assert "weights take 8 MiB" in model_size.size(str(path)).detail


def test_of_a_folder_the_matrix_of_latents_has_8_bits(tmp_path):
    shapes = {"layers.0.self_attn.kv_b_proj.weight": [4096, 1024], "layers.0.self_attn.o_proj.weight": [4096, 1024]}
    detail = model_size.size(write_folder(tmp_path, CONFIG | {"model_type": "youtu"}, shapes)).detail
    assert "8 MiB with --quantization q8, 6 MiB with --quantization q4" in detail


def test_a_file_of_a_model_like_gpt_is_decoded(tmp_path):
    shapes = {"token_embd": (1024, 1024), "blk.0.ffn_up": (1024, 1024)}
    path = write_bare(tmp_path / "x.gguf", "gpt2", 2, shapes, "Q8_0")
    assert "weights take 8 MiB" in model_size.size(str(path)).detail


@pytest.mark.parametrize(("recurrent", "attends", "kib"), [(3, False, 1), (3, True, 4), (4, False, 0)])
def test_layers_of_a_file_that_are_recurrent_alone_have_no_keys(recurrent, attends, kib, tmp_path):
    shapes = {f"blk.{layer}.ssm_out": (64, 64) for layer in range(recurrent)}
    shapes |= {f"blk.{layer}.attn_k": (32, 64) for layer in range(4) if attends or layer >= recurrent}
    path = write_bare(tmp_path / "x.gguf", "falcon-h1", 4, shapes, **{"attention.head_count_kv": 4})
    detail = model_size.size(str(path)).detail
    assert f"keys and values {kib} KiB a token" in detail if kib else "keys and values" not in detail


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\xff" * 8, (1 << 62).to_bytes(8, "little")])
def test_files_that_are_broken_are_no_error_here(tmp_path, content):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "x.gguf").write_bytes(content)
    for name in (tmp_path, tmp_path / "x.gguf", tmp_path / "none", "owner/name", "~nobody/x"):
        assert model_size.size(str(name)).result == "note"
