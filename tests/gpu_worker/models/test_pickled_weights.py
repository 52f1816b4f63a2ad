"""pytorch_model.bin is refused with a command, and the command makes a model that is the same."""

import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gpu_worker.models.pickled_weights import convert, main
from octavo.errors import BadModel

PROMPTS = [[5, 4, 3, 2, 1], [77]]


@pytest.fixture
def pickled(tiny, tmp_path) -> Path:
    """A checkpoint as Transformers wrote them before safetensors; two names share one tensor."""
    directory = Path(shutil.copytree(tiny("llama").directory, tmp_path / "my model"))
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = weights["model.norm.weight"]
    torch.save(weights, directory / "pytorch_model.bin")
    return directory


def test_the_command_of_the_message_converts_the_model(pickled, tiny, load, greedy):
    with pytest.raises(BadModel, match=r"has no model\.safetensors but pytorch_model\.bin, a pickle") as raised:
        load(pickled)
    command = shlex.split(str(raised.value).partition("Convert it once: ")[2])
    assert command[0] == "python"
    subprocess.run([sys.executable, *command[1:]], check=True, timeout=60)
    assert greedy(load(pickled), PROMPTS, 16) == greedy(load(tiny("llama").directory), PROMPTS, 16)


def test_shards_are_converted_with_their_index(pickled, tiny, load, greedy):
    weights = torch.load(pickled / "pytorch_model.bin", weights_only=True)
    (pickled / "pytorch_model.bin").unlink()
    places = {}
    for part in range(2):
        file = f"pytorch_model-0000{part + 1}-of-00002.bin"
        names = sorted(weights)[part::2]
        torch.save({name: weights[name] for name in names}, pickled / file)
        places |= dict.fromkeys(names, file)
    (pickled / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(BadModel, match=r"2 files like pytorch_model-00001-of-00002\.bin"):
        load(pickled)
    assert [path.name for path in convert(pickled)] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert greedy(load(pickled), PROMPTS, 16) == greedy(load(tiny("llama").directory), PROMPTS, 16)


class Evil:
    def __reduce__(self):
        return (os.system, ("touch ran",))


def test_code_in_a_pickle_is_not_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Evil()}, protocol=2))
    assert main([str(tmp_path)]) == 1
    assert "pytorch_model.bin: " in capsys.readouterr().err
    torch.save({"x": Evil()}, tmp_path / "pytorch_model.bin")
    assert main([str(tmp_path)]) == 1
    assert not (tmp_path / "ran").exists()


def test_what_cannot_be_converted_is_said_so(tmp_path, capsys):
    assert main([]) == 2
    assert main([str(tmp_path)]) == 1
    assert "has no pytorch_model.bin" in capsys.readouterr().err
    torch.save([1, 2], tmp_path / "pytorch_model.bin")
    with pytest.raises(BadModel, match="holds a list instead of tensors by name"):
        convert(tmp_path)
    torch.save({"x": torch.ones(2), "epoch": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(BadModel, match="holds other things than tensors: epoch"):
        convert(tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"x": "../x.bin"}}))
    with pytest.raises(BadModel, match="not the name of a file beside it"):
        convert(tmp_path)
