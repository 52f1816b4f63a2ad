"""Checkpoints in 4- and 8-bit codes (AWQ, GPTQ, compressed-tensors) compute what their numbers mean."""

import json
import logging
import random
import re
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from code_checkpoints import FORMS, Form, write_codes
from differences import difference
from effort import some
from gguf.quants import dequantize
from gguf_models import write_values
from random_models import random_mixture, save_random
from safetensors.torch import load_file, save_file
from transformers_types import SMALL

from gpu_worker.models.checkpoint.quantized import open_source
from gpu_worker.models.checkpoint.weights import FLOATS, BlockSource, SafetensorsSource
from gpu_worker.models.decoders.config import LlamaConfig
from gpu_worker.models.decoders.native_llama import LlamaPacking
from gpu_worker.ops import native
from octavo.cli.doctor import model_size
from octavo.model_files.quantization import rounds_inputs
from octavo.request.errors import BadModel

PROMPT = [(7 * i + 3) % 128 for i in range(50)]
PROMPTS = [[5, 4, 3, 2, 1], [77]]
KEPT = {  # in which blocks each form stays
    **dict.fromkeys(("gptq", "gptq-rows", "packed", "packed-bf16"), "q4"),
    **dict.fromkeys(("awq", "awq-rows", "gptq-asymmetric", "gptq-v2"), "q4_zeros"),
    **dict.fromkeys(("packed-asymmetric", "packed-early", "packed-rows"), "q4_zeros"),
    **dict.fromkeys(("packed-8", "int8"), "q8_rows"),
    "gptq-8": "q8",
    **dict.fromkeys(("gptq-8-asymmetric", "gptq-act-order", "gptq-groups-of-16"), FLOATS),
    **dict.fromkeys(("packed-f32", "packed-act-order", "int8-asymmetric"), FLOATS),
}
ROUNDINGS = {"packed-8": "15-bits-a-token", "int8": "8-bits-a-token"}  # of inputs, as the checkpoint says
MATRIX = "model.layers.1.mlp.down_proj.weight"


def opened(directory: Path) -> BlockSource:
    source = open_source(SafetensorsSource(directory), json.loads((directory / "config.json").read_text()))
    assert isinstance(source, BlockSource)
    return source


def decoded(blocks: torch.Tensor, kept: str) -> torch.Tensor:
    """What blocks mean: to the package gguf, which knows nothing of where they came from. It has no zeros: so these are
    taken off afterwards, in float64."""
    if kept == "q8_rows":
        return blocks[:, :4].contiguous().view(torch.float32) * blocks[:, 4:].contiguous().view(torch.int8).float()
    if kept != "q4_zeros":
        kind = gguf.GGMLQuantizationType.Q4_0 if kept == "q4" else gguf.GGMLQuantizationType.Q8_0
        return torch.from_numpy(dequantize(blocks.numpy(), kind))
    parts = blocks.view(len(blocks), -1, 20)
    scales, zeros = parts[:, :, :4].contiguous().view(torch.float16).double().split(1, dim=2)
    plain = torch.cat((torch.ones_like(scales).half().view(torch.uint8), parts[:, :, 4:]), dim=2)
    numbers = dequantize(plain.view(len(blocks), -1).numpy(), gguf.GGMLQuantizationType.Q4_0) + 8
    values = (torch.from_numpy(numbers).double().view(len(blocks), -1, 32) - zeros) * scales
    return values.view(len(blocks), -1).float()


@pytest.mark.parametrize("name", FORMS)
def test_values_and_blocks_are_exactly_what_the_file_means(name, tiny, tmp_path):
    meant = write_codes(tiny("llama-wide").directory, tmp_path / "codes", FORMS[name])
    source = opened(tmp_path / "codes")
    assert source.names() - meant.keys() == {
        f"{stem}.bias" for stem in (x.removesuffix(".weight") for x in meant) if "proj" in stem and "gptq" in name
    }
    for tensor, values in meant.items():
        assert torch.equal(source.get(tensor), values), tensor
        assert source.shape(tensor) == tuple(values.shape)
        kept = source.block_format(tensor)
        assert kept == (KEPT[name] if "proj" in tensor else FLOATS), tensor
        if kept != FLOATS:
            assert torch.equal(decoded(source.blocks(tensor), kept), values), tensor


CASES = some(
    [
        *(("llama-wide", name) for name in FORMS),
        *((m, f) for m in ("llama-biases", "qwen2", "qwen3", "mistral", "smollm3", "phi3", "phi3-wide") for f in FORMS),
    ],
    {
        *(("llama-wide", name) for name in ("awq", "gptq", "gptq-act-order", "packed-bf16", "int8")),
        *(("qwen2", "gptq-v2"), ("qwen3", "awq"), ("phi3-wide", "packed"), ("llama-biases", "int8")),
    },
)


@pytest.mark.parametrize("on_ops", ["native", "reference"], indirect=True)
@pytest.mark.parametrize(("model", "name"), CASES)
@pytest.mark.usefixtures("on_ops")
def test_a_model_in_codes_is_the_model_of_their_values(model, name, tiny, load, all_logits, greedy, tmp_path):
    """To the bit where values are decoded; products with blocks add up in another order. `auto` rounds inputs."""
    source, form = tiny(model).directory, FORMS[name]
    if not model.endswith("wide") and form.group > 32:
        form = replace(form, group=32)
    meant = write_codes(source, tmp_path / "codes", form)
    plain = load(write_values(source, tmp_path / "plain", meant), quantization="none")
    runner, automatic = load(tmp_path / "codes", quantization="none"), load(tmp_path / "codes")
    kept = KEPT[name] if "native" in runner.info.numerics else FLOATS
    expected = all_logits(plain, PROMPT)
    floats = kept == FLOATS and "+q4" not in runner.info.numerics  # the columns of a small matrix may lie in order
    assert difference(all_logits(runner, PROMPT), expected) <= (0.0 if floats else 1e-4)
    outputs = greedy(runner, PROMPTS, 16)
    assert outputs == greedy(plain, PROMPTS, 16)
    if kept != FLOATS and model == "llama-wide":
        assert outputs != greedy(load(source, quantization="none"), PROMPTS, 16), (
            "or else rounding changes nothing here"
        )
        rounding = ROUNDINGS.get(name, "15-bits")
        assert f"/f32+{kept}/in={rounding}+float32/" in automatic.info.numerics
        assert f"/f32+{kept}/in=float32/" in runner.info.numerics
        assert automatic.info.fingerprint != runner.info.fingerprint
        assert 0 < difference(all_logits(automatic, PROMPT), expected) < (0.3 if "8-bits" in rounding else 5e-3)


TWO_LAYERS = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 256}


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq-act-order", "packed-asymmetric", "int8"])
def test_layers_of_a_model_through_transformers_stay_in_codes(name, tiny, load, all_logits, tmp_path):
    source = tiny("arcee-wide", "Arcee", {**SMALL, **TWO_LAYERS}).directory
    meant = write_codes(source, tmp_path / "codes", FORMS[name])
    expected = all_logits(load(write_values(source, tmp_path / "plain", meant)), PROMPT)
    automatic, runner = load(tmp_path / "codes"), load(tmp_path / "codes", quantization="none")
    assert difference(all_logits(runner, PROMPT), expected) < 2e-3, "torch's own error beside float64 is a tenth of it"
    assert difference(all_logits(automatic, PROMPT), expected) < (0.3 if name == "int8" else 0.05)
    kept = KEPT[name] if "native" in runner.info.numerics else FLOATS
    rounding = ROUNDINGS.get(name, "15-bits").replace("-", " ")
    named = f"transformers:arcee ({kept}; inputs {rounding})" if kept != FLOATS else "transformers:arcee"
    assert automatic._decoder.name == named
    assert (automatic.info.fingerprint == runner.info.fingerprint) == (kept == FLOATS)
    assert (kept in automatic.info.numerics) == (kept != FLOATS)


def test_a_bias_of_zeros_is_read_where_the_model_has_one(tiny, load, all_logits, tmp_path):
    """And left out where it has none: some writers add it to codes."""
    fields = {**SMALL, **TWO_LAYERS, "attention_bias": True}
    source = tiny("arcee-wide-biased", "Arcee", fields).directory
    values = load_file(source / "model.safetensors")
    values = {name: each * (not name.endswith("bias")) for name, each in values.items()}
    assert "model.layers.1.self_attn.o_proj.bias" in values
    values["model.layers.1.mlp.down_proj.bias"] = torch.zeros(256)
    write_codes(write_values(source, tmp_path / "zeros", values), tmp_path / "codes", FORMS["awq"])
    unbiased = {name: each for name, each in values.items() if not name.endswith("bias")}
    alone = write_values(source, tmp_path / "unbiased", unbiased)
    content = json.loads((alone / "config.json").read_text()) | {"attention_bias": False}
    (alone / "config.json").write_text(json.dumps(content))
    write_codes(alone, tmp_path / "alone", FORMS["awq"])
    assert torch.equal(all_logits(load(tmp_path / "codes"), PROMPT), all_logits(load(tmp_path / "alone"), PROMPT))


@pytest.mark.skipif(native.load() is None, reason="the extension was not built")
@pytest.mark.parametrize("name", sorted(FORMS.keys() - {"packed-f32"}))  # whose scales alone tell that
def test_the_doctor_tells_the_memory_that_they_take(name, tiny, tmp_path):
    write_codes(tiny("llama-wide").directory, tmp_path / "codes", FORMS[name])
    content = json.loads((tmp_path / "codes/config.json").read_text())
    config, extension = LlamaConfig.from_dict(content), native.load()
    packing = LlamaPacking(opened(tmp_path / "codes"), config, torch.float32, "auto", extension, lambda *_: None)
    tensors = packing.in_memory().tensors.values()
    taken = sum(each.data.nbytes for each in tensors)
    told = re.search(r"weights take ([\d.]+) (KiB|MiB)", model_size.size(str(tmp_path / "codes")).detail)
    assert told
    unit = {"KiB": 1 << 10, "MiB": 1 << 20}[told[2]]
    assert abs(float(told[1]) * unit - taken) < 0.1 * taken + 0.5 * unit


def mixture(kind: str, folder: Path) -> Path:
    """A small one whose rows are whole groups of 32 columns."""
    config = random_mixture(random.Random(5), kind)
    if getattr(config, "head_dim", None):
        config.head_dim = 32
    return save_random(config, folder)


@pytest.mark.parametrize(
    ("kind", "name", "left_out", "kept"),
    [
        ("Mixtral", "packed-asymmetric", "", "q4_zeros"),
        ("Qwen2Moe", "awq", "", "q4_zeros"),
        ("Qwen2Moe", "awq", "shared_expert", FLOATS),
        ("Qwen3Moe", "gptq", "", "q4"),
        ("Qwen3Moe", "gptq", "layers.1.mlp.experts.2.up_proj", FLOATS),
        ("Glm4Moe", "packed-8", "", "q8_rows"),
        ("MiniMaxM2", "gptq-act-order", "", FLOATS),
    ],
)
def test_a_mixture_in_codes_is_the_mixture_of_their_values(
    kind, name, left_out, kept, load, all_logits, greedy, tmp_path
):
    """Its experts stay in codes, unless one of those that have the same inputs is in floats."""
    source = mixture(kind, tmp_path / "model")
    form = FORMS[name]
    meant = write_codes(source, tmp_path / "codes", replace(form, group=32 if form.group else 0), left_out)
    experts = [
        x for x in meant if "layers.1" in x and ".experts." in x and not x.endswith(("down_proj.weight", "w2.weight"))
    ]
    found = opened(tmp_path / "codes")
    assert {found.block_format(x) for x in experts} == {kept}
    assert all(torch.equal(found.get(x), meant[x]) for x in experts)
    plain = load(write_values(source, tmp_path / "plain", meant), quantization="none")
    expected = all_logits(plain, PROMPT)
    assert difference(all_logits(load(tmp_path / "codes", quantization="none"), PROMPT), expected) < 1e-3
    assert difference(all_logits(load(source, quantization="none"), PROMPT), expected) > 1e-2
    automatic = load(tmp_path / "codes")
    assert difference(all_logits(automatic, PROMPT), expected) < 2e-2
    alone = [greedy(automatic, [prompt], 16)[0] for prompt in PROMPTS]
    assert greedy(automatic, PROMPTS, 16) == alone


def test_an_expert_of_other_blocks_has_those_of_the_others(tmp_path):
    """A matrix whose zero points happen to be the middle is written as the ones beside it, or it would be rounded."""
    source = mixture("Qwen3Moe", tmp_path / "model")
    meant = write_codes(source, tmp_path / "codes", replace(FORMS["gptq"], group=32))
    stored = load_file(tmp_path / "codes/model.safetensors")
    name = "model.layers.0.mlp.experts.1.gate_proj"
    stored[f"{name}.qzeros"] = stored[f"{name}.qzeros"] - 1  # of the first of eight rows
    save_file(stored, tmp_path / "codes/model.safetensors")
    found = opened(tmp_path / "codes")
    beside = f"{name.replace('gate', 'up')}.weight"
    assert found.block_format(f"{name}.weight") == found.block_format(beside) == "q4_zeros"
    assert torch.equal(decoded(found.blocks(beside), "q4_zeros"), meant[beside])


@pytest.mark.skipif(native.load() is None, reason="the extension was not built")
def test_a_stack_whose_parts_round_their_inputs_in_two_ways_is_decoded(tiny, load, all_logits, tmp_path):
    """One has a scale for each row, and inputs of one scale for a token; the others have groups."""
    source = tiny("llama-wide").directory
    meant = write_codes(source, tmp_path / "codes", replace(FORMS["packed-8"], group=64))
    of_rows = write_codes(source, tmp_path / "rows", FORMS["packed-8"])
    file = tmp_path / "codes" / "model.safetensors"
    others = {name: each for name, each in load_file(tmp_path / "rows" / file.name).items() if "q_proj" in name}
    save_file(load_file(file) | others, file)
    meant |= {name: each for name, each in of_rows.items() if "q_proj" in name}
    stack = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    assert [opened(tmp_path / "codes").block_format(name) for name in stack] == ["q8_rows", "q8", "q8"]
    expected = all_logits(load(write_values(source, tmp_path / "plain", meant), quantization="none"), PROMPT)
    assert difference(all_logits(load(tmp_path / "codes", quantization="none"), PROMPT), expected) < 1e-4
    automatic = load(tmp_path / "codes")
    assert "/f32+q8/in=15-bits+float32/" in automatic.info.numerics
    assert difference(all_logits(automatic, PROMPT), expected) < 5e-3


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({}, True),
        ({"symmetric": False}, False),
        ({"strategy": "tensor"}, False),
        ({"num_bits": 4}, False),
        ({"type": "float"}, False),
        (None, False),
    ],
)
def test_a_checkpoint_says_whether_inputs_have_8_bits(inputs, expected):
    """As W8A8 of compressed-tensors does; without a word of inputs, none are rounded by it."""
    said = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True}
    group = {"weights": {"num_bits": 8, "type": "int"}, "input_activations": None if inputs is None else said | inputs}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}}
    assert rounds_inputs(config) == expected
    assert not rounds_inputs({})


def test_act_order_is_decoded_and_the_log_says_so(tiny, caplog, tmp_path):
    """Also where desc_act is set but columns lie in order: then codes stay."""
    source = tiny("llama-wide").directory
    write_codes(source, tmp_path / "codes", FORMS["gptq-act-order"])
    with caplog.at_level(logging.INFO):
        assert opened(tmp_path / "codes").block_format(MATRIX) == FLOATS
    assert "down_proj.weight and others are decoded" in caplog.text
    assert "columns of one scale lie apart" in caplog.text
    ordered = Form("gptq", symmetric=True, settings={"desc_act": True})
    write_codes(source, tmp_path / "ordered", ordered)
    assert opened(tmp_path / "ordered").block_format(MATRIX) == "q4"


def test_modules_that_are_left_out_stay_floats(tiny, tmp_path):
    settings = {"modules_to_not_convert": ["v_proj"]}
    form = Form("awq", settings=settings)
    meant = write_codes(tiny("llama-wide").directory, tmp_path / "codes", form, left_out="v_proj")
    source = opened(tmp_path / "codes")
    for name, values in meant.items():
        assert torch.equal(source.get(name), values)
        assert (source.block_format(name) == FLOATS) == ("proj" not in name or "v_proj" in name)


@pytest.mark.parametrize(
    ("name", "tensors", "message"),
    [
        ("awq", {"qzeros": None}, r"codes of 'model\.layers\.1\.mlp\.down_proj', but no tensor '.*\.qzeros'"),
        ("awq", {"scales": torch.ones(3, 256).half()}, "3 groups of scales for 256 columns in groups of 64"),
        ("awq", {"qweight": torch.zeros(256, 16, dtype=torch.int32)}, r"codes of '.*' are \(128, 256\), for scales of"),
        ("awq", {"qweight": torch.zeros(256, 32)}, r"qweight' is \(256, 32\) torch\.float32: no words"),
        ("awq", {"qzeros": torch.zeros(2, 32, dtype=torch.int32)}, r"the scales and zeros of '.*' are \(256, 4\)"),
        ("gptq", {"g_idx": torch.full((256,), 2, dtype=torch.int32)}, "in groups beyond the 2 that have scales"),
        ("gptq", {"g_idx": torch.zeros(8, dtype=torch.int32)}, r"g_idx' is \(8,\), for 256 columns"),
        ("gptq", {"qzeros": torch.full((2, 32), -1, dtype=torch.int32)}, "zero point of 0 .* as gptq_v2"),
        ("gptq-act-order", {"g_idx": None}, r"desc_act is true, but the checkpoint has no tensor '.*\.g_idx'"),
        ("gptq", {"bias": torch.ones(256)}, r"1 tensors of the checkpoint have no place .*down_proj\.bias"),
        ("packed", {"weight_shape": None}, r"has no tensor '.*down_proj\.weight_shape'"),
        ("packed", {"weight_shape": torch.tensor([256, 99])}, r"no codes of a \[256, 99\]"),
        ("packed-asymmetric", {"weight_zero_point": None}, "symmetric is false, but .* no tensor '.*_zero_point'"),
        ("packed-asymmetric", {"weight_zero_point": torch.ones(3)}, r"_zero_point' is \(3,\) torch\.float32"),
        ("packed", {"weight_scale": torch.ones(256, 3)}, "3 groups of scales for 256 columns"),
        ("int8", {"weight": torch.zeros(256, 256)}, r"is \(256, 256\) torch\.float32: no matrix of int8"),
    ],
)  # fmt: skip
def test_a_file_whose_parts_do_not_fit_is_refused_by_name(name, tensors, message, tiny, load, tmp_path):
    """Tensors of the last matrix are replaced or, where they are None, taken away."""
    write_codes(tiny("llama-wide").directory, tmp_path / "codes", FORMS[name])
    file = tmp_path / "codes" / "model.safetensors"
    changed = {f"{MATRIX.removesuffix('.weight')}.{part}": tensor for part, tensor in tensors.items()}
    stored = load_file(file) | changed
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, file)
    with pytest.raises(BadModel, match=message):
        load(tmp_path / "codes")
