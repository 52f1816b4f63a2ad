"""The error of a cache in fewer bits, through the native step, our decoders and Transformers' own."""

import json
from pathlib import Path

import pytest
import torch

from gpu_worker.ops.reference import ReferenceOps
from gpu_worker.running import loading

BOUNDS = {"float16": 2e-3, "bfloat16": 1e-2, "int8": 0.03, "fp8_e4m3": 0.08, "fp8_e5m2": 0.15}  # of the demo model


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("ops", ["native", "reference"])
def test_fewer_bits_cost_more_and_not_too_much(name, ops, tiny, load, all_logits, monkeypatch):
    if ops == "reference":
        monkeypatch.setattr(loading, "choose_ops", lambda *_: ReferenceOps())
    tokens = [(7 * i + 3) % 128 for i in range(60)]
    exact = all_logits(load(tiny(name).directory), tokens, [40])
    errors = {}
    for kind in BOUNDS:
        runner = load(tiny(name).directory, kv_cache_dtype=kind)
        assert runner.info.kv_dtype == kind and runner._arena.layers[0].dtype != torch.float32
        errors[kind] = float((all_logits(runner, tokens, [40]) - exact).norm() / exact.norm())
    assert 0 < errors["float16"] < errors["bfloat16"] < errors["int8"] < errors["fp8_e4m3"] < errors["fp8_e5m2"] < 0.5


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("demo_model")
def test_the_demo_model_says_much_the_same(load, all_logits, root: Path):
    """Without calibration; with inputs in float32, as int8 ones turn any difference into steps of theirs."""
    golden = json.loads((root / "tests/golden/demo_tokens.json").read_text())
    tokens = [t for case in golden["cases"] for t in case["prompt_ids"] + case["token_ids"]][:128]
    options = {"kv_cache_bytes": 1 << 24, "block_size": 16, "quantization": "none"}
    exact = all_logits(load("smollm2", **options), tokens, [85])
    for kind, bound in BOUNDS.items():
        near = all_logits(load("smollm2", kv_cache_dtype=kind, **options), tokens, [85])
        assert 0 < float((near - exact).norm() / exact.norm()) < bound, kind
        assert float((near.argmax(1) == exact.argmax(1)).float().mean()) > 0.9, kind
