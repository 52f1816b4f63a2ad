"""Which quantized checkpoints are read, and how what is not read is refused: by the name of its field."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.doctor import model_checks
from octavo.model_files.quantization import describe, find_obstacle

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False}
INT8 = WEIGHTS | {"num_bits": 8, "strategy": "channel", "group_size": None}
DYNAMIC = {"num_bits": 8, "type": "int", "dynamic": True}


def compressed(weights=WEIGHTS, group=None, **more):
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, **(group or {})}}
    settings = {"format": "pack-quantized", "quantization_status": "compressed", "config_groups": groups}
    return {"quant_method": "compressed-tensors", **settings, **more}


def config(content, model_type="llama"):
    return {"model_type": model_type, "quantization_config": content}


READ = [
    (AWQ, "awq in 4 bits: on a CPU kept in 4 bits, on a GPU decoded"),
    (GPTQ, "gptq in 4 bits: on a CPU kept in 4 bits"),
    (GPTQ | {"bits": 8}, "gptq in 8 bits: on a CPU kept in 8 bits"),
    (GPTQ | {"sym": False}, "kept in 4 bits"),
    (GPTQ | {"sym": False, "bits": 8}, "on a CPU decoded to the model's dtype"),
    (GPTQ | {"desc_act": True}, "gptq in 4 bits, in the order of activations: decoded to the model's dtype"),
    (GPTQ | {"group_size": 48}, "in groups that are not whole blocks of 32 columns: decoded"),
    (GPTQ | {"checkpoint_format": "gptq_v2", "dynamic": {"-:.*down.*": {}}}, "kept in 4 bits"),
    (compressed(), "compressed-tensors in 4 bits: on a CPU kept in 4 bits, on a GPU decoded to the model's dtype"),
    (compressed(WEIGHTS | {"symmetric": False}), "on a CPU kept in 4 bits"),
    (compressed(WEIGHTS | {"actorder": "group"}), "in the order of activations"),
    (compressed(WEIGHTS | {"actorder": "weight"}), "kept in 4 bits"),
    (compressed(INT8, {"input_activations": DYNAMIC}, format="int-quantized"), "kept in 8 bits"),
    (compressed(INT8, {"format": "int-quantized"}, format="mixed-precision"), "kept in 8 bits"),
    (compressed({"num_bits": 8, "type": "float"}, format="float-quantized"), "in 8-bit floats"),
    ({"quant_method": "fp8"}, "fp8 in 8-bit floats: decoded"),
]
REFUSED = [
    ("awq", "is no object"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
    ({"quant_method": ["awq"]}, "['awq']"),
    (AWQ | {"bits": 3}, "bits is 3, and 4 are read"),
    (AWQ | {"version": "gemv"}, "version is 'gemv'"),
    (AWQ | {"backend": "llm-awq"}, "backend 'llm-awq'"),
    (AWQ | {"zero_point": False}, "zero_point is not true"),
    (AWQ | {"group_size": 0}, "group_size is 0"),
    (GPTQ | {"bits": 2}, "bits is 2, and 4 and 8 are read"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    (GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
    (GPTQ | {"pack_dtype": "int16"}, "pack_dtype is 'int16'"),
    (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic gives some modules"),
    (compressed(config_groups={"W4A16": ["Linear"]}), "config_groups does not say"),
    (compressed(WEIGHTS | {"num_bits": 3}), "config_groups has 3 bits of int"),
    (compressed({"num_bits": 4, "type": "float"}), "4 bits of float"),
    (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
    (compressed(transform_config={"config_groups": {"u": {}}}), "transform_config"),
    (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    (compressed(quantization_status="frozen"), "quantization_status is 'frozen'"),
    (compressed(format="marlin-24"), "format is 'marlin-24'"),
    (compressed(WEIGHTS | {"strategy": "block"}), "group_0.weights.strategy is 'block'"),
    (compressed(WEIGHTS | {"group_size": None}), "group_0.weights.group_size is None"),
    (compressed(WEIGHTS | {"dynamic": True}), "group_0.weights.dynamic"),
    (compressed(INT8, {"input_activations": DYNAMIC | {"dynamic": False}}), "group_0.input_activations has static"),
    (compressed(group={"output_activations": DYNAMIC}), "group_0.output_activations"),
]


@pytest.mark.parametrize(("content", "how"), READ)
def test_what_is_read_is_described(content, how, tmp_path):
    assert find_obstacle(config(content)) == ""
    assert how in describe(config(content))
    (tmp_path / "config.json").write_text(json.dumps(config(content)))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    report = model_checks.model(str(tmp_path))
    assert (report.result, how in report.detail) == ("ok", True)


def test_what_is_not_read_is_refused_with_its_field_and_a_remedy():
    for content, reason in REFUSED:
        obstacle = find_obstacle(config(content))
        assert reason in obstacle
        assert obstacle.endswith("use a checkpoint that is not quantized, or a GGUF file")
    assert "on a CPU kept in 4 bits" in describe(config(AWQ, "opt"))
    assert "not read of gpt_oss" in find_obstacle(config(AWQ, "gpt_oss"))
    assert find_obstacle(config(AWQ, "qwen3_moe")) == ""
    assert find_obstacle({"model_type": "opt"}) == describe({"model_type": "opt"}) == ""
    assert find_obstacle(config(None)) == describe(config(None)) == ""


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@given(st.data())
def test_whatever_a_field_holds_the_answer_is_a_sentence(data):
    """A value of any kind in any field of any format: it is read or refused, and nothing else is raised."""
    content, _ = data.draw(st.sampled_from(READ))
    content = json.loads(json.dumps(content))
    places = [content, *content.get("config_groups", {}).values()]
    places += [group["weights"] for group in content.get("config_groups", {}).values()]
    place = data.draw(st.sampled_from(places))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(VALUES)
    if not find_obstacle(config(content)):
        assert describe(config(content))
