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

from octavo.request.errors import BadModel, Mismatch
from octavo.text.tokenizers.tokenizer import load_tokenizer

COUNT = 100_000 if is_night() else draws(40, 5600)
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


NO_IDS = ('"2"', "-1", "[true]", "[1099511627776]", "[[2]]", '{"a": 1}')
DEEP = '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", DEEP, "nested too deep"),
        ("generation_config.json", DEEP, "nested too deep"),
        ("tokenizer_config.json", DEEP, "nested too deep"),
        *(("generation_config.json", f'{{"eos_token_id": {ends}}}', "no token ids?") for ends in NO_IDS),
    ],
    ids=lambda value: value[:30],
)
def test_a_file_beside_the_weights_is_refused_by_all_who_read_it(file, text, message, load, tmp_path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / file).write_text(text)
    if file != "config.json":
        with pytest.raises(Mismatch, match=message):
            load_tokenizer(folder)
    if file != "tokenizer_config.json":
        with pytest.raises(BadModel, match=message):
            load(folder)


def test_a_token_id_beyond_all_vocabularies_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["a"] = 2**31
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(Mismatch, match="id 2147483648"):
        load_tokenizer(folder)
