"""What routers are told of files follows what is in the directory, whoever changes it."""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.migration.disk import file_list
from gpu_worker.migration.disk.block_files import HEADER_BYTES, BlockFiles
from gpu_worker.migration.disk.file_list import FileList
from octavo.request.ids import BlockHash

NUM_BYTES = 64


def hash_of(number: int) -> BlockHash:
    """Few folders, of several blocks each."""
    return BlockHash(bytes([number % 3]) + number.to_bytes(15, "big"))


class Reader:
    """A router that hears everything."""

    def __init__(self, files: BlockFiles) -> None:
        self.known: list[BlockHash] = []
        self.list = FileList(files, self.hear)

    def hear(self, written: Sequence[BlockHash], removed: Sequence[BlockHash]) -> None:
        assert written or removed
        assert not set(written) & set(self.known), "nothing is told twice"
        self.known += written
        assert set(removed) <= set(self.known)
        self.known = [each for each in self.known if each not in removed]

    def look(self) -> None:
        asyncio.run(self.list.look())


def files_in(directory: Path) -> BlockFiles:
    return BlockFiles(directory, NUM_BYTES, 100 * (HEADER_BYTES + NUM_BYTES))


def write(files: BlockFiles, number: int) -> None:
    files.write(hash_of(number), [memoryview(bytes([number]) * NUM_BYTES)])


def present(directory: Path) -> set[BlockHash]:
    names = (path.name for path in directory.glob("*/*"))
    return {BlockHash(bytes.fromhex(name)) for name in names if len(name) == 32 and name != "x" * 32}


OPERATIONS = st.tuples(
    st.sampled_from(["write", "write by another", "remove", "folder", "all", "strange", "look"]), st.integers(0, 9)
)


@given(operations=st.lists(OPERATIONS, max_size=20))
def test_the_list_is_what_is_there(operations: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("blocks")
    files, another = files_in(directory), files_in(directory)
    reader = Reader(files)
    for operation, number in operations:
        path = directory / hash_of(number).hex()[:2] / hash_of(number).hex()
        if operation == "write":
            write(files, number)
            asyncio.run(reader.list.note_written([hash_of(number)]))
            assert reader.list.has(hash_of(number))
        elif operation == "write by another":
            write(another, number)
        elif operation == "remove":
            path.unlink(missing_ok=True)
        elif operation in ("folder", "all"):
            shutil.rmtree(path.parent if operation == "folder" else directory, ignore_errors=True)
        elif operation == "strange" and path.parent.exists():
            (path.parent / f"{path.name}.part-12").touch()
            (path.parent / ("x" * 32)).touch()
            (path.parent / ("7" * 32)).write_bytes(b"a block of another model")
        else:
            reader.look()
    reader.look()
    found = present(directory) - {BlockHash(bytes.fromhex("7" * 32))}
    assert set(reader.known) == found == {hash_of(each) for each in range(10) if reader.list.has(hash_of(each))}
    later = Reader(files)
    later.look()
    assert set(later.known) == found


def test_a_folder_at_rest_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_list, "SETTLED_S", -1.0)
    files = files_in(tmp_path)
    for number in range(9):
        write(files, number)
    reader, read = Reader(files), list[str]()
    reader.look()
    inner = files.list_folder
    monkeypatch.setattr(files, "list_folder", lambda folder, known: read.append(folder) or inner(folder, known))
    reader.look()
    assert read == []
    write(files, 30)
    reader.look()
    assert read == [hash_of(30).hex()[:2]]
    assert set(reader.known) == {hash_of(number) for number in (*range(9), 30)}


def test_of_many_files_the_last_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_list, "MOST_TOLD", 5)
    files = files_in(tmp_path)
    reader = Reader(files)
    for number in range(12):
        write(files, number)
        reader.look()
        assert reader.known == [hash_of(each) for each in range(max(0, number - 4), number + 1)]
    later = Reader(files)
    later.look()
    assert set(later.known) == set(reader.known)
