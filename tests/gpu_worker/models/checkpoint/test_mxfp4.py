"""gpt-oss as it is published: experts in MXFP4, exactly as Transformers decodes them, and kept in 4 bits."""

import copy
import json

import pytest
import torch
from differences import difference
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from gpu_worker.models.checkpoint.gpt_oss_source import GptOssSource
from gpu_worker.models.checkpoint.mxfp4 import decoded, is_kept
from gpu_worker.models.checkpoint.weights import FLOATS, SafetensorsSource
from gpu_worker.ops import native
from octavo.request.errors import BadModel

EXPERTS = ("gate_up_proj", "down_proj")
TOKENS = [(7 * i + 3) % 128 for i in range(50)]


def random_parts(shape, seed, lowest=1, highest=254):
    """Blocks and scales of a matrix of each expert: [experts, columns, rows] when decoded."""
    generator = torch.Generator().manual_seed(seed)
    experts, columns, rows = shape
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(lowest, highest + 1, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
    return blocks, scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_are_those_of_transformers(dtype):
    blocks, scales = random_parts((3, 64, 5), seed=1, lowest=4, highest=251)
    made = torch.stack([decoded(*each) for each in zip(blocks, scales, strict=True)])
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert torch.equal(made.to(dtype).transpose(1, 2), expected)
    assert torch.equal(made.to(dtype).float(), made), "nothing is rounded"


def test_scales_outside_float16_are_kept_of_zeros_alone():
    blocks, scales = random_parts((1, 64, 5), seed=1, lowest=104, highest=143)
    assert is_kept(blocks, scales)
    for scale in (103, 144):
        outside = scales.clone()
        outside[0, 2, 1] = scale
        assert not is_kept(blocks, outside)
        zeros = blocks.clone()
        zeros[0, 2, 1] = torch.tensor([0x80, 0x08] * 8)
        assert is_kept(zeros, outside)


@pytest.fixture
def published(tiny, altered):
    """A directory as gpt-oss is published, and the model in memory that it holds."""
    model = copy.deepcopy(tiny("gpt_oss"))

    def quantize(stored):
        for seed, name in enumerate(sorted(name for name in stored if name.endswith(EXPERTS))):
            blocks, scales = random_parts(tuple(stored.pop(name).shape), seed, lowest=124, highest=126)
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
            model.model.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)

    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return model, altered("gpt_oss", quantize, quantization_config=quantization)


@pytest.mark.parametrize("on_ops", ["native", "generic", "reference"], indirect=True)
@pytest.mark.usefixtures("on_ops")
def test_published_files_give_the_logits_of_their_values(published, load, greedy, all_logits):
    """Inputs of kept codes are rounded to 15 bits by `auto`, as those of other codes."""
    model, directory = published
    exact, fast = (load(directory, quantization=scheme) for scheme in ("none", "auto"))
    expected = model.logits(TOKENS)
    assert difference(all_logits(exact, TOKENS), expected) < 1e-4
    assert difference(all_logits(fast, TOKENS), expected) < 0.02
    if native.load() is not None:
        assert "mxfp4" in fast._decoder.name
        assert exact.info.fingerprint != fast.info.fingerprint, "workers that round otherwise compute other tokens"
    prompts = [TOKENS[:20], [5]]
    for prompt, output in zip(prompts, greedy(exact, prompts, 24), strict=True):
        assert output == model.greedily(prompt, output)


def test_a_layer_is_kept_as_a_whole_or_decoded(published, load, all_logits):
    """One block whose scale float16 does not hold: inputs of the layer's other experts are not rounded either."""
    model, directory = published
    stored = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    stored[f"{name}_scales"][2, 3, 1] = 80
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    parts = stored[f"{name}_blocks"], stored[f"{name}_scales"]
    model.model.get_parameter(name).data = convert_moe_packed_tensors(*parts, dtype=torch.float32)
    source = GptOssSource(SafetensorsSource(directory), 4)
    formats = [source.block_format(f"model.layers.1.mlp.experts.0.{part}_proj.weight") for part in ("up", "down")]
    assert formats == ["mxfp4", FLOATS]
    assert difference(all_logits(load(directory), TOKENS), model.logits(TOKENS)) < 0.02


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda stored, name: stored.pop(f"{name}_scales"), "no tensor '.*_scales'"),
        (lambda stored, name: stored.update({f"{name}_scales": stored[f"{name}_scales"][:1].clone()}), "MXFP4 has not"),
        (lambda stored, name: stored[f"{name}_scales"].fill_(255), "a scale is no number"),
        (lambda stored, name: stored[f"{name}_scales"].fill_(254), "a value is too large for torch.float32"),
        (lambda stored, name: stored.update({f"{name}_blocks": stored[f"{name}_blocks"].int()}), "MXFP4 has not"),
    ],
    ids=["missing", "of another shape", "no number", "too large", "of another type"],
)
def test_a_broken_part_is_named(published, load, change, said):
    _, directory = published
    stored = load_file(directory / "model.safetensors")
    change(stored, next(name for name in stored if name.endswith("_blocks")).removesuffix("_blocks"))
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadModel, match=said):
        load(directory)


@pytest.mark.parametrize("named", ["num_local_experts", "blocks"])
def test_another_number_of_experts_is_refused(named, published, load):
    _, directory = published
    if named == "blocks":
        stored = load_file(directory / "model.safetensors")
        cut = {name: x[:3].clone() if name.endswith(("_blocks", "_scales")) else x for name, x in stored.items()}
        save_file(cut, directory / "model.safetensors", {"format": "pt"})
    else:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {named: 3}))
    with pytest.raises(BadModel, match=r"has 3 experts|router\.weight"):
        load(directory)
