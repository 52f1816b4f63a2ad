"""What `octavo doctor` says of a folder before anything is loaded: refused, slower, or neither."""

import json

import pytest
from gguf_models import write_bare

from octavo.cli.doctor import model_checks

REFUSED = {"model_type": "rwkv", "architectures": ["RwkvForCausalLM"]}
OTHER = {"model_type": "cohere", "architectures": ["CohereForCausalLM"]}
OWN = {"model_type": "llava", "text_config": {"model_type": "llama"}}
PROGRAMMED = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}
SEEING = {"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text"}}


@pytest.fixture
def folder(tmp_path, request):
    (tmp_path / "config.json").write_text(json.dumps(request.param))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return str(tmp_path)


@pytest.mark.parametrize("folder", [REFUSED], indirect=True)
def test_what_a_worker_refuses_is_told_with_its_reason(folder):
    report = model_checks.adapters(folder)
    assert (report.name, report.result) == ("model", "bad")
    assert "a worker refuses it: " in report.detail and "rwkv keeps a recurrent state" in report.detail


@pytest.mark.parametrize(
    ("folder", "slower"), [(OTHER, True), (OWN, False), (SEEING, False), (PROGRAMMED, False)], indirect=["folder"]
)
def test_what_runs_by_the_code_of_transformers_is_told_to_be_slower(folder, slower):
    report = model_checks.model(folder)
    assert (report.result, "slower than octavo's own decoders" in report.detail) == ("ok", slower)


@pytest.mark.parametrize(("name", "result"), [("no/such/model", "note"), ("nobody/model", "ok")])
def test_a_model_that_is_nowhere_has_no_tokenizer(name, result):
    assert model_checks.tokenizer(name).result == result


def test_a_gguf_file_without_a_vocabulary_is_served_without_text(tmp_path):
    path = write_bare(tmp_path / "model.gguf", "llama", 1, {"token_embd": (64, 64)})
    for name in (tmp_path, path):
        report = model_checks.tokenizer(str(name))
        assert report.result == "note" and "token ids are served, and text is refused" in report.detail
