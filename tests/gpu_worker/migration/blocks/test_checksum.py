"""The checksum of a block that travels in parts: of the extension, in NumPy, and as the golden vectors have it."""

import json
import random
import runpy
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.migration.blocks import checksum
from gpu_worker.migration.blocks.checksum import BlockChecksum
from gpu_worker.migration.blocks.frames import checksum_seed
from gpu_worker.ops import native

GOLDEN = Path(__file__).parents[3] / "golden"


def built() -> ModuleType:
    extension = native.load()
    assert extension is not None, "the extension was not built: make extension"
    return extension.part_sum


@pytest.fixture(params=["numpy", "native"], scope="module")
def sums(request: pytest.FixtureRequest) -> ModuleType:
    return built() if request.param == "native" else checksum


def of(sums: ModuleType, data: bytes, seed: int, cuts: Sequence[int] = ()) -> int:
    lanes = bytearray(64)
    ends = sorted({0, *(cut * 64 for cut in cuts if cut * 64 < len(data)), len(data)})
    parts = list(pairwise(ends))
    random.Random(len(cuts)).shuffle(parts)
    for begin, end in parts:
        middle = (begin + end) // 2
        sums.add_part(lanes, seed, begin, [memoryview(data)[begin:middle], memoryview(data)[middle:end]])
    return sums.digest(lanes, seed, len(data))


def test_golden_checksums(sums: ModuleType) -> None:
    content = runpy.run_path(str(GOLDEN / "make_block_checksums.py"))["content"]
    rows = json.loads((GOLDEN / "block_checksums.json").read_text())["checksum"]
    assert len(rows) > 40
    for row in rows:
        assert f"{of(sums, content(row['length']), int(row['seed'], 16)):016x}" == row["checksum"], row


def test_golden_seeds() -> None:
    for row in json.loads((GOLDEN / "block_checksums.json").read_text())["seed"]:
        arguments = bytes.fromhex(row["secret"]), int(row["ticket"], 16), row["index"], bytes.fromhex(row["name"])
        assert f"{checksum_seed(*arguments):016x}" == row["seed"]


@given(length=st.integers(0, 3000), seed=st.integers(0, 2**64 - 1), cuts=st.lists(st.integers(0, 46), max_size=6))
def test_parts_in_any_order_and_runs_of_any_length(length: int, seed: int, cuts: list[int]) -> None:
    data = random.Random(seed).randbytes(length)
    whole = of(checksum, data, seed)
    assert of(checksum, data, seed, cuts) == of(built(), data, seed, cuts) == of(built(), data, seed) == whole


@given(data=st.data(), length=st.integers(1, 2000), seed=st.integers(0, 2**64 - 1))
def test_a_change_is_seen(data: st.DataObject, length: int, seed: int) -> None:
    """One bit, two words that changed places, zeros in place of a word, another length, another seed."""
    right = random.Random(seed).randbytes(length)
    sums = built()
    changed = bytearray(right)
    bit = data.draw(st.integers(0, 8 * length - 1))
    changed[bit // 8] ^= 1 << bit % 8
    wrong = [bytes(changed), right + b"\0", right[:-1]]
    if length >= 128:
        first, second = data.draw(st.lists(st.integers(0, length // 8 - 1), min_size=2, max_size=2, unique=True))
        words = [right[at : at + 8] for at in range(0, length, 8)]
        words[first], words[second] = words[second], words[first]
        wrong.append(b"".join(words))
        words[first] = bytes(8)
        wrong.append(b"".join(words))
    wrong_sums = {of(sums, each, seed) for each in wrong}
    assert of(sums, right, seed) not in wrong_sums | {of(sums, right, seed ^ 1 << 63)}


def test_without_the_extension_the_checksum_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(3).randbytes(5000)
    digests = set()
    for load in (native.load, lambda: None):
        monkeypatch.setattr(native, "load", load)
        block = BlockChecksum(77)
        block.add_part(4096, [memoryview(data)[4096:]])
        block.add_part(0, [memoryview(data)[:100], memoryview(data)[100:4096]])
        digests.add(block.digest(len(data)))
        with pytest.raises(ValueError, match="offset"):
            block.add_part(32, [])
    assert len(digests) == 1
