"""GGUF headers: what the gguf package writes is what we read; a malformed file is refused before it costs anything."""

import random
import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from effort import draws
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.model_files.gguf import GgufFile, MalformedGguf, TensorType

WORDS = ["", "a", "Ġthe", "\U0001f600", "x" * 300]
NUMBERS = {"uint8": 200, "int8": -100, "uint16": 60000, "int16": -30000, "uint32": 4_000_000_000, "int64": -(2**62)}
NUMBERS |= {"int32": -2_000_000_000, "uint64": 2**63, "float32": 0.5, "float64": 0.1}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A file with every kind of value."""
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    writer = GGUFWriter(path, "llama")
    for kind, value in {**NUMBERS, "bool": True}.items():
        getattr(writer, f"add_{kind}")(f"n.{kind}", value)
    writer.add_string("word", "Ġthe")
    writer.add_array("words", WORDS)
    writer.add_array("numbers", list(range(-5, 1000)))
    writer.add_array("floats", [0.5, -2.0])
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_tensor("plain", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    writer.add_tensor("half", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_what_was_written_is_read(written):
    with GgufFile(written) as file:
        data = file.metadata
        assert {key[2:]: data[key] for key in data if key.startswith("n.")} == {**NUMBERS, "bool": True}
        assert data["n.bool"] is True
        assert data.string("word") == "Ġthe"
        assert data.strings("words") == WORDS
        assert data.integers("numbers") == list(range(-5, 1000))
        assert data["floats"] == [0.5, -2.0]
        assert data["nested"] == [[1, 2], [3]]
        assert data.integer("absent", 7) == 7 and data.number("n.uint8") == 200.0
        assert "absent" not in data and len(data) == len(list(data))
        plain = file.tensors["plain"]
        assert (plain.shape, plain.type) == ((2, 3, 4), TensorType.F32)
        view = file.tensor_bytes("plain")
    assert np.frombuffer(view, np.float32).tolist() == list(range(24)), "a view outlives the file"


def text(value):
    return struct.pack("<Q", len(value)) + value


def header(values=b"", num_values=0, tensors=b"", num_tensors=0, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values) + values + tensors


def tensor(name=b"t", dims=(32,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def one(value, count=1, key=b"key"):
    return header(text(key) + value, count) + b"\0" * 64


def tensors(*described):
    return header(tensors=b"".join(described), num_tensors=len(described)) + b"\0" * 256


def array(kind, count, content=b""):
    return struct.pack("<IIQ", 9, kind, count) + content


HUGE, ALIGNMENT = 2**62, b"general.alignment"
MALFORMED = {
    "empty": (b"", "too few"),
    "short": (b"GGUF", "too few"),
    "other magic": (b"GGML" + b"\0" * 60, "not a GGUF file"),
    **{f"version {number}": (header(version=number), f"version {number} is not supported") for number in (1, 4)},
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "huge number of values": (header(num_values=HUGE), "values do not fit"),
    "more values than there are": (header(text(b"k") + struct.pack("<II", 4, 1), 2), "values do not fit"),
    "huge number of tensors": (header(num_tensors=HUGE) + b"\0" * 64, "tensors do not fit"),
    "huge key": (header(struct.pack("<Q", HUGE), 1) + b"\0" * 64, "a metadata key of"),
    "long key": (header(text(b"k" * 70000) + struct.pack("<II", 4, 1), 1), "a metadata key of 70000"),
    "key is not UTF-8": (header(text(b"\xff") + struct.pack("<II", 4, 1), 1) + b"\0" * 64, "not UTF-8"),
    "unknown value type": (one(struct.pack("<I", 13)), "unknown value type 13"),
    "huge string": (one(struct.pack("<IQ", 8, HUGE)), "the file ends before"),
    **{f"huge array of kind {kind}": (one(array(kind, HUGE)), "does not fit") for kind in (0, 8, 9)},
    "string in an array leaves the file": (one(array(8, 2, text(b"a") + struct.pack("<Q", HUGE))), "leaves the file"),
    "array of unknown type": (one(array(77, 1)), "unknown value type 77"),
    "arrays in arrays in arrays": (one(array(9, 1, array(9, 1, array(9, 1, array(0, 0))[4:])[4:])), "nested too deep"),
    "key twice": (header((text(b"k") + struct.pack("<II", 4, 1)) * 2, 2) + b"\0" * 64, "appears twice"),
    "alignment 0": (one(struct.pack("<II", 4, 0), key=ALIGNMENT), "power of two"),
    "alignment 24": (one(struct.pack("<II", 4, 24), key=ALIGNMENT), "power of two"),
    "alignment is a word": (one(struct.pack("<I", 8) + text(b"32"), key=ALIGNMENT), "is str, not an integer"),
    "5 dimensions": (tensors(tensor(dims=(1,) * 5)), "has 5 dimensions"),
    "huge number of dimensions": (tensors(text(b"t") + struct.pack("<I", 2**31)), "has 2147483648 dimensions"),
    "huge tensor": (tensors(tensor(dims=(HUGE, HUGE, HUGE))), "after the file's end"),
    "tensor past the end": (tensors(tensor(dims=(65,))), "after the file's end"),
    "tensor not aligned": (tensors(tensor(offset=4)), "not aligned"),
    "tensor twice": (tensors(tensor(), tensor()), "appears twice"),
    "tensors overlap": (tensors(tensor(dims=(32,)), tensor(b"u", dims=(32,), offset=96)), "'t' and 'u' overlap"),
    "unknown tensor type": (tensors(tensor(kind=77)), "unknown type 77"),
    "removed tensor type": (tensors(tensor(kind=31)), "type Q4_0_4_4, which llama.cpp has removed"),
    "row of half a block": (tensors(tensor(dims=(16, 2), kind=2)), "no multiple of 32"),
}


@pytest.mark.parametrize(("content", "reason"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_is_refused_without_allocating(tmp_path, content, reason):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedGguf, match=rf"bad\.gguf: .*{reason}"):
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=draws(40, 150))
@given(seed=st.integers(0, 2**32 - 1))
def test_damage_is_refused_or_harmless(written, tmp_path_factory, seed):
    """Cut anywhere, or with a few bytes changed: MalformedGguf or something well-formed, nothing else."""
    rng = random.Random(seed)
    content = bytearray(written.read_bytes())
    if rng.random() < 0.3:
        del content[rng.randrange(len(content)) :]
    for _ in range(rng.randint(1, 4)):
        if content:
            content[rng.randrange(min(len(content), 3500))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    with suppress(MalformedGguf), GgufFile(path) as file:
        assert list(map(file.metadata.__getitem__, file.metadata))
        for name, info in file.tensors.items():
            assert len(file.tensor_bytes(name)) == info.num_bytes


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda data: data.integer("word"), "word is str, not an integer"),
        (lambda data: data.integer("n.bool"), "n.bool is bool, not an integer"),
        (lambda data: data.string("n.uint8"), "n.uint8 is int, not a string"),
        (lambda data: data.strings("numbers"), "numbers is not an array of strings"),
        (lambda data: data.integers("words"), "words is not an array of integers"),
        (lambda data: data.integers("word"), "word is str, not an array"),
        (lambda data: data.integer("absent"), "absent is missing"),
    ],
)
def test_a_value_of_another_type_is_named(written, ask, message):
    with GgufFile(written) as file, pytest.raises(MalformedGguf, match=message):
        ask(file.metadata)
