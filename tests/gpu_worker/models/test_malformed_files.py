"""Broken files of models: each is refused with an error that says why, or loads, in bounded memory and time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from effort import draws, is_night
from live.cluster import ROOT
from malformed.seed_models import write_folder

from gpu_worker.running.loading import load_runner
from octavo.request.errors import BadModel, Mismatch
from octavo.text.tokenizers.tokenizer import load_tokenizer

COUNT = 100_000 if is_night() else draws(112, 5600)
FIRST = int(os.environ.get("OCTAVO_TEST_SEED", "0"))


@pytest.mark.scaled
@pytest.mark.timeout(6 * 3600 if is_night() else 900)
def test_changed_files_are_refused_or_load(tmp_path: Path) -> None:
    """In a process of its own, whose address space is limited: `python -m malformed` says what counts as a finding."""
    command = [sys.executable, "-W", "error", "-m", "malformed", str(tmp_path), str(FIRST), str(COUNT)]
    support = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=support, check=False)
    assert done.returncode == 0, f"it died at {(tmp_path / 'last').read_text()}:\n{done.stderr[-3000:]}"
    *findings, summary = done.stdout.splitlines()
    told = json.loads(summary)
    assert told["findings"] == 0 and not findings, "\n".join(findings[:20])
    assert told["tried"] == COUNT and told["grown_mib"] < 700
    outcomes = {outcome.partition(": ")[2] for outcome in told["outcomes"]}
    assert {"loaded", "BadModel", "MalformedGguf", "Mismatch"} <= outcomes, "the changes are too few or too wild"
    print(summary)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2**31}, "num_layers is 2147483648"),
        ({"max_position_embeddings": 2**40}, "context_tokens is 1099511627776"),
        ({"num_attention_heads": 2**40, "num_key_value_heads": 1}, "num_heads is"),
        ({"head_dim": -8}, "head_dim is -8"),
        ({"rms_norm_eps": float("nan"), "rope_theta": "x"}, "cannot be used"),
        ({"architectures": 5}, "broken or contradict each other"),
        ({"rope_scaling": [1]}, "broken or contradict each other"),
        ({"model_type": "gpt2", "n_layer": 2**40}, "num_layers is"),
    ],
)
def test_what_no_model_has_is_refused_before_it_costs_anything(changes: dict, message: str, tmp_path: Path) -> None:
    if changes.get("model_type") == "gpt2":
        changes = {**changes, "num_hidden_layers": None}
    folder = write_folder(tmp_path / "model", **changes)
    with pytest.raises(BadModel, match=message):
        load_runner(str(folder), kv_cache_bytes=1 << 20, swap_bytes=0, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("depth", [10_000, 1_000_000])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_deep_json_is_refused(file: str, depth: int, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / file).write_text('{"x": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises((BadModel, Mismatch), match="nested too deep"):
        load_tokenizer(folder)
        load_runner(str(folder), kv_cache_bytes=1 << 20, swap_bytes=0, cache_dir=tmp_path / "cache")


def test_a_token_id_beyond_all_vocabularies_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["a"] = 2**31
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(Mismatch, match="id 2147483648"):
        load_tokenizer(folder)


@pytest.mark.parametrize("ends", ["2", -1, [True], [2**40], [[2]], {"a": 1}])
def test_an_end_token_is_a_token_id(ends: object, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(Mismatch, match="no token id"):
        load_tokenizer(folder)
    with pytest.raises(BadModel, match="no token ids"):
        load_runner(str(folder), kv_cache_bytes=1 << 20, swap_bytes=0, cache_dir=tmp_path / "cache")
