"""Layers of models that run through Transformers, multiplied by the extension, beside torch's with the same numbers."""

import itertools

import gguf
import numpy as np
import pytest
import torch
import transformers
from differences import difference
from gguf.quants import dequantize, quantize
from gguf_models import write_values
from random_models import random_model
from safetensors.torch import load_file
from transformers_types import GEMMA4, LATENT, ROUTED_EXPERTS, SMALL, STATEFUL

from gpu_worker.models.checkpoint.weights import SafetensorsSource
from gpu_worker.models.packed import packed_cache
from gpu_worker.models.packed.layer_stacks import StackPacking
from gpu_worker.models.packed.packed_experts import PackedExperts
from gpu_worker.models.packed.packed_linear import LayerPacking, PackedEmbedding, PackedLinear
from gpu_worker.ops import native
from octavo.request.errors import InvalidArgument

pytestmark = pytest.mark.skipif(native.load() is None, reason="the extension was not built")
PROMPT = [(7 * i + 3) % 128 for i in range(50)]
SIZES = {"num_hidden_layers": 2, "hidden_size": 64}
ALONE = {"num_experts": 1, "num_experts_per_tok": 1}
TWO = ["linear_attention", "full_attention"]
MODELS = {
    "arcee": ("Arcee", {**SMALL, **SIZES, "tie_word_embeddings": True}),  # its embedding is the output projection
    "gemma4": ("Gemma4Text", {**GEMMA4, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128}),
    "gemma4-many": (
        "Gemma4Text",
        {**GEMMA4, "enable_moe_block": True, "num_experts": 16, "top_k_experts": 2, "moe_intermediate_size": 32}
        | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
    ),
    "starcoder2": ("Starcoder2", {**SMALL, **SIZES}),  # with biases
    "axk1": ("AXK1", {**LATENT, **ROUTED_EXPERTS, **SIZES}),  # a tensor for each matrix of an expert
    "qwen3_5": ("Qwen3_5Text", {**STATEFUL["qwen3_5_text"][1], **SIZES, "layer_types": TWO}),
    "lfm2": ("Lfm2", {**STATEFUL["lfm2"][1], **SIZES, "layer_types": ["conv", "full_attention"]}),
    "jamba": (
        "Jamba",
        {**STATEFUL["jamba"][1], **SIZES, "mamba_dt_rank": 32, "num_experts": 1, "num_experts_per_tok": 1},
    ),
    "granitemoe": ("GraniteMoe", {**SMALL, **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize(("name", "scheme"), [*itertools.product(MODELS, ("q8", "q4")), ("starcoder2", "q8-a8")])
def test_a_directory_is_rounded_as_its_layers_are(name, scheme, tiny, load, all_logits, tmp_path):
    """Beside a directory with the rounded numbers. What is left are the inputs."""
    kind, fields = MODELS[name]
    source = tiny(f"{name}-packed", kind, fields)
    model = random_model(getattr(transformers, f"{kind}Config")(**fields), seed=1)
    model.load_state_dict(source.model.state_dict())
    packing = LayerPacking(SafetensorsSource(source.directory), torch.float32, scheme, native.load(), lambda *_: None)
    shapes = packing.shapes(model)
    assert not any("router" in weight for weight in shapes), "rounded, it would choose other experts"
    for weight in shapes:
        as_q8 = scheme.startswith("q8") or "embed" in weight or weight == "lm_head.weight"
        own = gguf.GGMLQuantizationType.Q8_0 if as_q8 else gguf.GGMLQuantizationType.Q4_0
        parameter = model.get_parameter(weight)
        rounded = dequantize(quantize(parameter.detach().numpy(), own), own)
        parameter.data.copy_(torch.from_numpy(np.ascontiguousarray(rounded)))
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    runner = load(source.directory, quantization=scheme)
    assert difference(all_logits(runner, PROMPT), expected) < (0.1 if scheme.endswith("a8") else 0.01)
    assert difference(source.logits(PROMPT), expected) > 0
    layers = [each for each in runner._decoder._model.modules() if isinstance(each, PackedLinear | PackedEmbedding)]
    mixtures = [each for each in runner._decoder._model.modules() if isinstance(each, PackedExperts)]
    assert len(layers) + 2 * len(mixtures) == len(shapes) + source.model.config.tie_word_embeddings
    assert len(mixtures) == (name == "axk1")
    assert runner.info.fingerprint != load(source.directory).info.fingerprint
    assert scheme[:2] in runner.info.numerics


def test_rounding_of_what_has_no_such_layer_is_refused(tiny, load):
    narrow = tiny("arcee-narrow", "Arcee", {**SMALL, "hidden_size": 24, "intermediate_size": 40, "head_dim": 10})
    with pytest.raises(InvalidArgument, match="q8: no layer of this model is packed: say auto"):
        load(narrow.directory, quantization="q8")


@pytest.mark.parametrize("equal", [True, False])
def test_a_stored_output_projection_is_packed_if_it_is_not_the_embedding(equal, tiny, load, all_logits, tmp_path):
    source = tiny("starcoder2-tied", "Starcoder2", {**SMALL, **SIZES, "tie_word_embeddings": True})
    values = load_file(source.directory / "model.safetensors")
    embedding = values["model.embed_tokens.weight"]
    whole = write_values(
        source.directory, tmp_path / "whole", values | {"lm_head.weight": (1 if equal else 2) * embedding}
    )
    runner = load(whole, quantization="q8")
    alone = load(source.directory, quantization="q8")
    assert torch.equal(all_logits(runner, PROMPT), all_logits(alone, PROMPT)) == equal
    assert len(runner._decoder.packed.tensors) == len(alone._decoder.packed.tensors) + (not equal)


def test_a_second_start_maps_the_layers(tiny, load, all_logits, tmp_path, monkeypatch):
    """One with other bits packs them again, and so does one that finds a damaged file."""
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)
    source, written = tiny("starcoder2-packed", *MODELS["starcoder2"]), []
    write = StackPacking.into
    monkeypatch.setattr(StackPacking, "into", lambda packing, file: [written.append(1), write(packing, file)][1])

    def logits(scheme):
        runner = load(source.directory, quantization=scheme, packed_cache=str(tmp_path / "packed"))
        return all_logits(runner, PROMPT)

    expected = all_logits(load(source.directory, quantization="q8", packed_cache="off"), PROMPT)
    for scheme, times in (("q8", 1), ("q8", 1), ("q8-a8", 1), ("q4", 2), ("q8", 2)):
        assert torch.equal(logits(scheme), expected) == (scheme == "q8")
        assert len(written) == times
    for file in (tmp_path / "packed").glob("*.packed"):
        file.write_bytes(file.read_bytes()[:-1000])
    assert torch.equal(logits("q8"), expected)
    assert len(written) == 3
