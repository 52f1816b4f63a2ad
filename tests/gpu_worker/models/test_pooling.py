"""Hidden states are those of Transformers, and folders say how vectors are made of them."""

import json

import pytest
import torch
from effort import diagonal
from instruction_sets import OPS
from pooled import vectors

from gpu_worker.models.pooling_files import read_pooling
from octavo.pooling.params import ModelPooling, PoolingParams, PoolKind, logits_of
from octavo.request.errors import BadModel, Unimplemented

PROMPTS = [[7, 3, 99, 12, 45, 3, 3, 81, 20, 64, 1, 9, 30], [5], list(range(20, 60))]
ROWS = [PoolingParams(normalize=False), PoolingParams(PoolKind.MEAN, normalize=False), logits_of((4, 40))]


@torch.inference_mode()
def of_transformers(model, prompt):
    out = model(torch.tensor([prompt]), use_cache=False, output_hidden_states=True)
    states = out.hidden_states[-1][0]  # after the last norm
    return [states[-1], states.mean(0), out.logits[0, -1, [4, 40]]]


@pytest.mark.usefixtures("on_ops")
@pytest.mark.parametrize(("name", "on_ops"), diagonal(["qwen3", "mistral", "gpt2", "gemma3"], OPS), indirect=["on_ops"])
def test_states_are_those_of_transformers(tiny, load, name: str) -> None:
    model = tiny(name)
    runner = load(model.directory)
    for prompt in PROMPTS:
        found = vectors(runner, [(prompt, params) for params in ROWS], max_batch_tokens=16, max_batch_sequences=8)
        for mine, theirs in zip(found, of_transformers(model.model, prompt), strict=True):
            torch.testing.assert_close(torch.tensor(mine), theirs.float(), rtol=2e-3, atol=2e-3)


def test_a_checkpoint_without_head_and_prefix_is_the_same_model(tiny, altered, load) -> None:
    def strip(weights):
        del weights["lm_head.weight"]
        for name in list(weights):
            weights[name.removeprefix("model.")] = weights.pop(name)

    asked = [(prompt, PoolingParams()) for prompt in PROMPTS]
    bare = load(altered("qwen3", strip, architectures=["Qwen3Model"]))
    assert vectors(bare, asked) == vectors(load(tiny("qwen3").directory), asked)


def module(kind: str, path: str = "") -> dict:
    return {"type": f"sentence_transformers.models.{kind}", "path": path}


TRANSFORMER, POOL, NORM = module("Transformer"), module("Pooling", "1_Pooling"), module("Normalize", "2_Normalize")
QWEN = {"model_type": "qwen3"}


def read(folder, modules, **modes) -> ModelPooling:
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    return read_pooling("m", folder, QWEN, 8)


@pytest.mark.parametrize(
    ("modules", "modes", "expected"),
    [
        ([TRANSFORMER, POOL, NORM], {"pooling_mode_lasttoken": True}, ModelPooling(8)),
        ([TRANSFORMER, POOL], {"pooling_mode_mean_tokens": True}, ModelPooling(8, PoolKind.MEAN, False)),
        ([TRANSFORMER, POOL, NORM], {"pooling_mode": "mean"}, ModelPooling(8, PoolKind.MEAN)),
    ],
)
def test_the_folder_says_how(tmp_path, modules, modes, expected) -> None:
    assert read_pooling("m", tmp_path, QWEN, 8) == ModelPooling(8)
    assert read(tmp_path, modules, **modes) == expected


@pytest.mark.parametrize(
    ("modules", "modes"),
    [
        ([TRANSFORMER, POOL, module("Dense", "2_Dense")], {"pooling_mode_lasttoken": True}),
        ([TRANSFORMER, POOL], {"pooling_mode_cls_token": True}),
        ([TRANSFORMER, POOL], {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}),
    ],
)
def test_what_is_not_run_is_refused_unless_a_request_names_another_way(tmp_path, modules, modes) -> None:
    found = read(tmp_path, modules, **modes)
    with pytest.raises(Unimplemented):
        found.resolved()
    assert found.resolved("last").kind is PoolKind.LAST


@pytest.mark.parametrize("text", ["{", "[3]", json.dumps([module("Pooling", "../x")]), json.dumps([module("Pooling")])])
def test_a_broken_folder_is_a_bad_model(tmp_path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(BadModel):
        read_pooling("m", tmp_path, QWEN, 8)


def test_a_reranker_is_known_by_its_name_or_its_configuration(tmp_path) -> None:
    assert read_pooling("Qwen3-Reranker-0.6B", tmp_path, QWEN, 8).judge == "qwen3"
    assert read_pooling("m", tmp_path, QWEN | {"is_original_qwen3_reranker": True}, 8).judge == "qwen3"
    assert read_pooling("other-reranker", tmp_path, {"model_type": "llama"}, 8).judge == ""
