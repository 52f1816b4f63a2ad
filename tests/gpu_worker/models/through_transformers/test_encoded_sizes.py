"""`octavo doctor` says how much memory the weights of models with an encoder take, as they do once they are loaded."""

import re

import pytest
import torch
from encoded_types import ENCODED_TYPES, TinyEncoded
from spoken_types import TinySpeech

from gpu_worker.models.packed.packed_linear import PackedLinear
from octavo.cli.doctor import model_checks, model_size

SIZES = {"vocab_size": 6000, "d_model": 96}  # so large that it does not matter that no file has positions of Marian
BART = {"encoder_ffn_dim": 384, "decoder_ffn_dim": 384}
WAYS = {"": {}, " with --dtype bfloat16": {"dtype": "bfloat16"}}
WAYS |= {f" with --quantization {scheme}": {"quantization": scheme} for scheme in ("q8", "q4")}


def weight_bytes(model: torch.nn.Module) -> int:
    """What the model keeps: each tensor once, and packed matrices."""
    tensors = [*model.parameters(), *model.state_dict(keep_vars=True).values()]
    for module in model.modules():
        if isinstance(module, PackedLinear):
            tensors += [module.matrix.data, *([] if module.bias is None else [module.bias])]
    return sum({each.data_ptr(): each.nbytes for each in tensors}.values())


@pytest.mark.parametrize("name", [*ENCODED_TYPES, "whisper"])
def test_doctor_says_what_is_kept_of_a_model_with_an_encoder(name, tmp_path, load, monkeypatch):
    monkeypatch.setattr(model_size, "_mib", lambda num_bytes: f"{num_bytes} bytes")
    if name == "whisper":
        directory = TinySpeech(tmp_path, **SIZES, **BART).directory
    else:
        more = BART if ENCODED_TYPES[name][1].keys() >= BART.keys() else {"d_ff": 384}
        directory = TinyEncoded(name, tmp_path, **SIZES, **more).directory
    assert "run by the code of Transformers" in model_checks.model(str(directory)).detail
    detail = model_size.size(str(directory)).detail
    for way, options in WAYS.items():
        decoder = load(directory, **options)._decoder
        [told] = re.findall(rf"(\d+) bytes{way}[,;]", detail)
        assert int(told) == pytest.approx(weight_bytes(decoder._model), rel=0.05), way
        width = decoder.num_kv_heads * decoder.head_dim
        assert f"keys and values {2 * decoder.num_layers * width * 4 / 1024:.0f} KiB a token" in detail
