"""GGUF files of models like GPT run on octavo's own decoder of them, as the directories do that they were made of."""

import gguf
import pytest
import torch
from differences import difference
from effort import diagonal
from gguf_gpt import MODELS
from gguf_models import encoded
from instruction_sets import OPS

from gpu_worker.models.adapter_support import support_in
from octavo.request.errors import BadModel, InvalidArgument

PROMPT = [(7 * i + 3) % 128 for i in range(50)]


@pytest.fixture
def made(tiny):
    return lambda name: tiny(f"gguf {name}", *MODELS[name])


@pytest.mark.parametrize(("name", "on_ops"), diagonal(list(MODELS), OPS), indirect=["on_ops"])
@pytest.mark.usefixtures("on_ops")
def test_a_file_runs_as_its_directory(name, made, converted, load, all_logits):
    model, runner = made(name), load(converted(name))
    assert runner._decoder.name == "gpt"
    expected = all_logits(load(model.directory), PROMPT)
    assert difference(all_logits(runner, PROMPT), expected) < 1e-5
    assert difference(all_logits(runner, PROMPT, (7, 8, 30)), expected) < 1e-5
    assert difference(expected, model.logits(PROMPT)) < 1e-4
    assert runner.info.eos_token_ids == (2,)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F16"])
def test_quantized_tensors_are_decoded(kind, made, converted, load, all_logits):
    """Beside a file of floats with the same numbers."""
    own = gguf.GGMLQuantizationType[kind]

    def is_rounded(stored, tensor):
        return tensor.dim() > 1 and stored != "position_embd.weight"

    def rounded(stored, tensor):
        return encoded(tensor.contiguous().numpy(), kind)[1] if is_rounded(stored, tensor) else tensor

    name = "gpt2-wide"
    path = converted(name, kind=lambda stored, x: own if is_rounded(stored, x) else gguf.GGMLQuantizationType.F32)
    found = all_logits(load(path), PROMPT)
    assert torch.equal(found, all_logits(load(converted(name, rounded)), PROMPT))
    assert difference(found, made(name).logits(PROMPT)) > 1e-5
    with pytest.raises(InvalidArgument, match="no model like GPT"):
        load(path, quantization="q8")
    assert not support_in(path).modules


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("gpt2", {"attention.scale": 0.5}, r"does not know, .*: gpt2\.attention\.scale"),
        ("gpt2", {"context_length": 127}, r"wpe\.weight.* is \(128, 32\), the configuration says \(127, 32\)"),
        ("gpt2", "blk.1.attn_qkv.bias", r"has nothing of which 'transformer\.h\.1\.attn\.c_attn\.bias' is made"),
        ("gpt2", "position_embd.weight", r"has nothing of which 'transformer\.wpe\.weight' is made"),
        ("bloom", {"attention.head_count_kv": 3}, r"attn_qkv\.weight' is \(144, 48\), the header says 96 x 48"),
        ("bloom", {"attention.key_length": 4}, r"attn_qkv\.weight' is \(144, 48\), the header says 72 x 48"),
        ("falcon", {"tensor_data_layout": "other"}, "tensor_data_layout 'other' is not read"),
        ("falcon", {"rope.dimension_count": 4}, "turns 4 of 8 dimensions of a head"),
        ("falcon-grouped", {"rope.scaling.type": "longrope"}, r"rope\.scaling\.type 'longrope' is not read"),
        ("mpt", {"attention.head_count_kv": 2}, "the header says"),
        ("mpt", "blk.2.ffn_norm.weight", r"has nothing of which 'transformer\.blocks\.2\.norm_2\.weight' is made"),
    ],
)  # fmt: skip
def test_a_setting_that_is_not_understood_and_a_lacking_tensor_are_named(name, more, message, converted, load):
    settings = more if isinstance(more, dict) else {}
    with pytest.raises(BadModel, match=message):
        load(converted(name, lambda stored, x: None if stored == more else x, more=settings))


def test_files_that_do_not_say_how_positions_are_told_are_refused(converted, load):
    biases = {f"blk.{layer}.attn_qkv.bias": torch.zeros(48) for layer in range(3)}
    with pytest.raises(BadModel, match="Falcon RW, whose positions files do not say: use a directory"):
        load(converted("falcon", extra=biases))

    def with_one_norm(stored, tensor):
        return None if "attn_norm_2" in stored else tensor

    name = "falcon-grouped"
    with pytest.raises(BadModel, match=r"Falcon 2, whose base of positions \(falcon\.rope\.freq_base\)"):
        load(converted(name, with_one_norm))
    load(converted(name, with_one_norm, more={"rope.freq_base": 500042.0}))
    with pytest.raises(BadModel, match=r"has rope_freqs\.weight, and its model turns no positions"):
        load(converted("bloom", extra={"rope_freqs.weight": torch.ones(4)}))
    with pytest.raises(BadModel, match=r"blk\.0\.ffn\.act\.scales"):
        load(converted("mpt", extra={"blk.0.ffn.act.scales": torch.ones(192)}))
