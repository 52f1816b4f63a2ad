"""What a mixture of experts must have, and which adapters it takes. test_architectures.py compares its numbers."""

import pytest
import torch
from loras import ATTENTION, adapted, greedy, write_files, write_lora

from gpu_worker import LLM, LoRARequest, SamplingParams
from octavo.model_files.lora_files import read_lora
from octavo.request.errors import BadModel


@pytest.mark.parametrize("part", ["experts.3.up_proj", "gate", "shared_expert.down_proj", "shared_expert_gate"])
def test_a_part_that_is_missing_is_named(part, altered, load):
    name = f"model.layers.1.mlp.{part}.weight"
    with pytest.raises(BadModel, match=f"no tensor '{name}'"):
        load(altered("qwen2_moe", lambda weights: weights.pop(name)))


def test_adapters_of_attention_are_taken_and_those_of_mlps_are_not(tiny, load, tmp_path):
    """In the layer that has no experts, an MLP may have one."""
    model = tiny("qwen2_moe-some")
    decoder = load(model.directory)._decoder
    assert decoder.config.expert_layers == (False, True, False, True)
    attention = write_lora(tmp_path / "attention", model.model, seed=1, modules=ATTENTION)
    decoder.load_lora(read_lora(attention))
    for layer in (0, 1):
        name = f"base_model.model.model.layers.{layer}.mlp.down_proj.lora_"
        tensors = {f"{name}A.weight": torch.ones(1, 64), f"{name}B.weight": torch.ones(32, 1)}
        files = read_lora(write_files(tmp_path / f"{layer}", tensors, {"r": 1, "lora_alpha": 1}))
        if layer == 0:
            decoder.load_lora(files)
        else:
            with pytest.raises(BadModel, match=r"layers\.1\.mlp\.down_proj.* in which the model has experts"):
                decoder.load_lora(files)


@pytest.mark.parametrize("name", ["olmoe", "glm4_moe", "gpt_oss"])
def test_tokens_with_an_adapter_are_those_of_its_weights(name, tiny, load, tmp_path):
    model, prompt = tiny(name), [(7 * i + 3) % 128 for i in range(20)]
    path = write_lora(tmp_path / "lora", model.model, seed=2, modules=ATTENTION)
    with LLM(str(model.directory), runner=load(model.directory, adapter_bytes=1 << 20)) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        asked = [None, LoRARequest("one", 1, str(path))]
        answers = llm.generate([prompt] * 2, params, lora_request=asked, use_tqdm=False)
    plain, changed = (answer.outputs[0].token_ids for answer in answers)
    with adapted(model.model, path) as merged:
        assert changed == greedy(merged, prompt, 24)
    assert plain == greedy(model.model, prompt, 24) != changed


def test_layers_that_draft_tokens_are_passed_over_and_no_others(tiny, altered, load, all_logits):
    """GLM-4.5 is published with one, of which Transformers makes nothing either."""
    more, tokens = {"model.layers.4.eh_proj.weight": torch.ones(32, 64)}, list(range(30))
    passed_over = load(altered("glm4_moe", lambda weights: weights.update(more), num_nextn_predict_layers=1))
    assert torch.equal(all_logits(passed_over, tokens), all_logits(load(tiny("glm4_moe").directory), tokens))
    with pytest.raises(BadModel, match=r"no place in the model: model\.layers\.4\.eh_proj"):
        load(altered("glm4_moe", lambda weights: weights.update(more), num_nextn_predict_layers=0))


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("qwen2_moe", {"num_experts_per_tok": 5}, "5 of 4 experts"),
        ("glm4_moe-grouped", {"n_group": 5}, "of 5 groups of 12"),
        ("glm4_moe-grouped", {"topk_group": 5}, "of 5 of 4 groups"),
        ("glm4_moe-grouped", {"topk_group": 1, "num_experts_per_tok": 4}, "4 experts of 1 of 4"),
    ],
)
def test_experts_that_are_not_there_cannot_be_asked(name, more, message, altered, load):
    with pytest.raises(BadModel, match=message):
        load(altered(name, **more))
