"""GGUF files that are parts of one model are read as one, and what does not belong together is refused."""

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cli.doctor import model_checks
from octavo.model_files.gguf import GgufFile, MalformedGguf
from octavo.model_files.gguf_parts import first_parts, model_name, part_paths
from octavo.model_files.gguf_support import find_obstacle


def write(folder, num_tensors, in_part, arch="llama", name="m"):
    """The files of a model, as the package gguf divides it. Tensor `ti` is full of i."""
    folder.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(folder / f"{name}.gguf", arch, split_max_tensors=in_part)
    writer.add_string("word", "here")
    for i in range(num_tensors):
        writer.add_tensor(f"t{i}", np.full((2, 32), i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob(f"{name}*.gguf"))


@settings(max_examples=20)
@given(st.integers(1, 9), st.integers(1, 9))
def test_all_tensors_of_all_parts_are_those_of_one_file(tmp_path_factory, num_tensors, in_part):
    paths = write(tmp_path_factory.mktemp("parts"), num_tensors, in_part)
    assert len(paths) == -(-num_tensors // in_part)
    with GgufFile(paths[0]) as file:
        assert file.paths == paths
        assert sorted(file.tensors) == sorted(f"t{i}" for i in range(num_tensors))
        assert file.metadata.string("word") == "here"
        for i in range(num_tensors):
            values = np.frombuffer(file.tensor_bytes(f"t{i}"), np.float32)
            assert (values == i).all() and len(values) == 64
            file.release(f"t{i}")
            assert (np.frombuffer(file.tensor_bytes(f"t{i}"), np.float32) == i).all()
            del values
        assert find_obstacle(file) == ""


def renamed(paths):
    paths[0] = paths[0].rename(paths[0].with_name("model.gguf"))


def fewer_tensors(paths):
    shutil.copy(write(paths[0].parent / "other", 7, 3)[2], paths[2])


SPOILT = [
    (lambda paths: shutil.copy(paths[2], paths[1]), r"m-00002-of-00003\.gguf says that it is another part than 2 of 3"),
    (
        lambda paths: paths[1].write_bytes(paths[1].read_bytes().replace(b"t3", b"t0")),
        r"m-00002-of-00003\.gguf: tensor 't0' is in another part, too",
    ),
    (fewer_tensors, r"its 3 parts have 7 tensors, and 8 were split"),
    (lambda paths: paths[2].unlink(), r"is the first of 3 parts, and m-00003-of-00003\.gguf is not beside it"),
    (renamed, r"model\.gguf is the first of 3 parts, but is not named …-00001-of-00003\.gguf"),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILT)
def test_parts_that_do_not_belong_together_are_refused(spoil, message, tmp_path):
    paths = write(tmp_path, 8, 3)
    with GgufFile(paths[1]) as file:
        assert find_obstacle(file).startswith("this is part 2 of the 3 of a model: give the first")
    spoil(paths)
    with pytest.raises(MalformedGguf, match=message):
        GgufFile(paths[0])
    report = model_checks.model(str(paths[0]))
    assert report.result == "bad" and report.fix


def test_a_model_of_many_parts_has_one_name():
    paths = [Path(f"a/big-Q4_K_M-{i:05}-of-00003.gguf") for i in (1, 2, 3)]
    assert {model_name(path) for path in paths} == {"big-Q4_K_M"}
    assert part_paths(paths[0], 3) == paths
    assert part_paths(paths[1], 3) == part_paths(paths[0], 4) == part_paths(Path("a/big.gguf"), 3) == []
    assert first_parts([*paths, Path("a/small.gguf")]) == [paths[0], Path("a/small.gguf")]
    assert model_name(Path("x/SmolLM2.Q4_K.gguf")) == "SmolLM2.Q4_K"


def test_the_doctor_counts_the_files_of_a_model(tmp_path):
    write(tmp_path, 8, 3)
    report = model_checks.model(str(tmp_path))
    assert (report.result, "in 3 files" in report.detail) == ("ok", True)
    write(tmp_path / "other", 2, 9, arch="stablelm")
    assert "run by the code of Transformers" in model_checks.model(str(tmp_path / "other")).detail
