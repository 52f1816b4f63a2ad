"""gpt-oss as it is published: experts in MXFP4, exactly as Transformers decodes them."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from gpu_worker.models.checkpoint.mxfp4 import decoded
from octavo.request.errors import BadModel

EXPERTS = ("gate_up_proj", "down_proj")


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
    made = decoded("x", blocks, scales, dtype)
    assert torch.equal(made, convert_moe_packed_tensors(blocks, scales, dtype=dtype))
    assert torch.equal(made.float(), decoded("x", blocks, scales, torch.float32)), "nothing is rounded"


@pytest.fixture
def published(tiny, tmp_path):
    """A directory as gpt-oss is published, and the model in memory that it holds."""
    model = copy.deepcopy(tiny("gpt-oss"))
    directory = shutil.copytree(model.directory, tmp_path / "published")
    stored = load_file(directory / "model.safetensors")
    for seed, name in enumerate(sorted(name for name in stored if name.endswith(EXPERTS))):
        blocks, scales = random_parts(tuple(stored.pop(name).shape), seed, lowest=124, highest=126)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        model.model.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(config))
    return model, directory


def test_published_files_give_the_logits_of_their_values(published, load, greedy, all_logits):
    model, directory = published
    runner = load(directory)
    tokens = [(7 * i + 3) % 128 for i in range(50)]
    expected = model.logits(tokens)
    assert float((all_logits(runner, tokens) - expected).abs().max() / expected.abs().max()) < 1e-4
    prompts = [tokens[:20], [5]]
    for prompt, output in zip(prompts, greedy(runner, prompts, 24), strict=True):
        assert output == model.greedily(prompt, output)


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
