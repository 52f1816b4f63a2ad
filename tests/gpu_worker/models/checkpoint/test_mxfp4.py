"""gpt-oss as it is published: experts in MXFP4, exactly as Transformers decodes them, and kept in 4 bits."""

import copy

import pytest
import torch
from code_checkpoints import MXFP4, put_in_mxfp4, random_parts
from differences import difference
from instruction_sets import OPS
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from gpu_worker.models.checkpoint.gpt_oss_source import GptOssSource
from gpu_worker.models.checkpoint.mxfp4 import decoded, is_kept
from gpu_worker.models.checkpoint.weights import FLOATS, SafetensorsSource
from gpu_worker.ops import native
from octavo.request.errors import BadModel

TOKENS = [(7 * i + 3) % 128 for i in range(50)]


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
def publish(tiny, altered):
    """Writes a directory as gpt-oss is published, changed, and gives the model in memory that it held before."""

    def write(change=lambda stored: None, **fields):
        model = copy.deepcopy(tiny("gpt_oss"))

        def quantize(stored):
            for name, parts in put_in_mxfp4(stored).items():
                model.model.get_parameter(name).data = convert_moe_packed_tensors(*parts, dtype=torch.float32)
            change(stored)

        return model, altered("gpt_oss", quantize, quantization_config=MXFP4, **fields)

    return write


@pytest.mark.parametrize("on_ops", OPS, indirect=True)
@pytest.mark.usefixtures("on_ops")
def test_published_files_give_the_logits_of_their_values(publish, load, greedy, all_logits):
    """Inputs of kept codes are rounded to 15 bits by `auto`, as those of other codes."""
    model, directory = publish()
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


def test_a_layer_is_kept_as_a_whole_or_decoded(publish, load, all_logits):
    """One block whose scale float16 does not hold: inputs of the layer's other experts are not rounded either."""
    name, parts = "model.layers.1.mlp.experts.down_proj", []

    def change(stored):
        stored[f"{name}_scales"][2, 3, 1] = 80
        parts.extend([stored[f"{name}_blocks"], stored[f"{name}_scales"]])

    model, directory = publish(change)
    model.model.get_parameter(name).data = convert_moe_packed_tensors(*parts, dtype=torch.float32)
    source = GptOssSource(SafetensorsSource(directory), 4)
    formats = [source.block_format(f"model.layers.1.mlp.experts.0.{part}_proj.weight") for part in ("up", "down")]
    assert formats == ["mxfp4", FLOATS]
    assert difference(all_logits(load(directory), TOKENS), model.logits(TOKENS)) < 0.02


PART = "model.layers.0.mlp.experts.down_proj"
BROKEN = [
    (lambda stored: stored.pop(f"{PART}_scales"), "no tensor '.*_scales'"),
    (lambda stored: stored.update({f"{PART}_scales": stored[f"{PART}_scales"][:1].clone()}), "MXFP4 has not"),
    (lambda stored: stored.update({f"{PART}_blocks": stored[f"{PART}_blocks"].int()}), "MXFP4 has not"),
    (lambda stored: stored[f"{PART}_scales"].fill_(255), "a scale is no number"),
    (lambda stored: stored[f"{PART}_scales"].fill_(254), "a value is too large for torch.float32"),
    (
        lambda stored: stored.update({x: stored[x][:3].clone() for x in stored if x.endswith(("_blocks", "_scales"))}),
        "has 3 experts",
    ),
]


@pytest.mark.parametrize(("change", "said"), BROKEN, ids=[said for _, said in BROKEN])
def test_a_broken_part_is_named(publish, load, change, said):
    with pytest.raises(BadModel, match=said):
        load(publish(change)[1])


def test_another_number_of_experts_is_refused(publish, load):
    with pytest.raises(BadModel, match=r"has 3 experts|router\.weight"):
        load(publish(num_local_experts=3)[1])
