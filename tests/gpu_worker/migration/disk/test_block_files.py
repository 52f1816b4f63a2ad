"""Files of blocks: whatever happens to them, a block that is read is the one that was written."""

import os
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.migration.disk import block_files
from gpu_worker.migration.disk.block_files import HEADER_BYTES, BlockFiles
from octavo.request.ids import BlockHash

SIZES = (128, 200, 56)  # of the runs of a block
NUM_BYTES = sum(SIZES)


def hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(4, "big") * 4)


def runs_of(number: int) -> list[memoryview]:
    return [memoryview(bytearray([number % 251 + 1]) * size) for size in SIZES]


def empty_runs() -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in SIZES]


def files_in(directory: Path, most_blocks: int = 100) -> BlockFiles:
    return BlockFiles(directory, NUM_BYTES, most_blocks * (HEADER_BYTES + NUM_BYTES))


OPERATIONS = st.tuples(st.sampled_from(["write", "damage", "cut", "swap", "open"]), st.integers(0, 5))


@given(operations=st.lists(OPERATIONS, max_size=12))
def test_what_is_read_was_written(operations: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("blocks")
    files, whole = files_in(directory), set[int]()
    for operation, number in operations:
        path = next(iter(directory.glob(f"*/{hash_of(number).hex()}")), None)
        other = next(iter(directory.glob(f"*/{hash_of(number + 1).hex()}")), None)
        if operation == "write":
            files.write(hash_of(number), runs_of(number))
            whole.add(number)
        elif operation == "open":
            files = files_in(directory)
        elif path is not None and operation == "damage" and (data := bytearray(path.read_bytes())):
            place = number * 79 % len(data)
            data[place] = (data[place] + 1) % 256
            path.write_bytes(data)
            whole.discard(number)
        elif path is not None and operation == "cut":
            os.truncate(path, number * 60)
            whole.discard(number)
        elif path is not None and other is not None and operation == "swap":
            path.write_bytes(other.read_bytes())
            whole.discard(number)
    for number in range(6):
        runs = empty_runs()
        assert files.read(hash_of(number), runs) == (number in whole)
        assert number not in whole or runs == runs_of(number)
        assert files.has(hash_of(number)) == (number in whole)  # a damaged one is removed


def test_the_oldest_go_when_it_is_full(tmp_path: Path) -> None:
    files = files_in(tmp_path, most_blocks=10)
    for number in range(10):
        files.write(hash_of(number), runs_of(number))
        os.utime(next(tmp_path.glob(f"*/{hash_of(number).hex()}")), (number, number))
    assert files.read(hash_of(0), empty_runs())  # used now
    files.write(hash_of(10), runs_of(10))
    assert [number for number in range(11) if files.has(hash_of(number))] == [0, *range(3, 11)]
    assert files.latest(2) == [hash_of(0), hash_of(10)]
    assert files.num_bytes <= 10 * (HEADER_BYTES + NUM_BYTES)


def test_files_of_others_are_left_alone_and_a_directory_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    others = [tmp_path / "models" / "weights.safetensors", tmp_path / "01" / "notes.part-1", tmp_path / "notes"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100 * NUM_BYTES))
        os.utime(path, (1, 1))
    files = files_in(tmp_path, most_blocks=10)
    for number in range(30):
        files.write(hash_of(number), runs_of(number))
    assert files.has(hash_of(29)) and all(path.exists() for path in others)
    assert "models" not in files.folders()
    shutil.rmtree(tmp_path)
    for number in range(30):
        files.write(hash_of(number), runs_of(number))
        assert files.has(hash_of(number))


def test_a_worker_that_died_leaves_no_part(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    files.write(hash_of(1), runs_of(1))
    part = tmp_path / "01" / f"{hash_of(2).hex()}.part-00000000"
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(b"half")
    assert files_in(tmp_path).latest(9) == [hash_of(1)]
    assert part.exists()  # somebody may be writing it
    long_ago = time.time() - 2 * block_files.ABANDONED_S
    os.utime(part, (long_ago, long_ago))
    files_in(tmp_path)
    assert not part.exists()


def test_others_cannot_read_them_and_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files_in(tmp_path / "new").write(hash_of(1), runs_of(1))
    assert not any(path.stat().st_mode & 0o077 for path in (tmp_path / "new", *(tmp_path / "new").glob("**/*")))
    files = files_in(tmp_path / "full")
    monkeypatch.setattr(os, "writev", lambda file, runs: 1)
    with pytest.raises(OSError, match="a part of it only"):
        files.write(hash_of(1), runs_of(1))
    assert not list((tmp_path / "full").glob("*/*"))
