"""Packed weights in a file: the bits of what was packed, or packed anew; within the bound of the folder."""

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from code_checkpoints import FORMS as FORMS_OF_CODES
from code_checkpoints import write_codes
from effort import draws, some
from gguf_models import write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_worker.models.checkpoint.quantized import open_source
from gpu_worker.models.checkpoint.weights import SafetensorsSource
from gpu_worker.models.decoders.config import LlamaConfig
from gpu_worker.models.decoders.native_llama import LlamaPacking
from gpu_worker.models.gguf.llama_like import LlamaLikeSource, read_config
from gpu_worker.models.packed import packed_cache, packed_file
from gpu_worker.models.packed.packed_cache import PackedCache, Packing, content_key
from gpu_worker.models.packed.packed_file import PackedFileWriter, Place, open_packed
from gpu_worker.models.packed.packed_weights import NativeMatrix, PackedWeights
from gpu_worker.ops import native
from octavo.model_files.gguf import GgufFile
from octavo.model_files.json_file import read_json

EXTENSION = native.load()
pytestmark = pytest.mark.skipif(EXTENSION is None, reason="the extension was not built")
KEY = {"of": "this test"}
ROOM = 1 << 30


@pytest.fixture
def every_isa() -> Iterator[list[str]]:
    assert EXTENSION is not None
    chosen = EXTENSION.isa()
    yield EXTENSION.isas()
    EXTENSION.select_isa(chosen)


def packing_of(path: Path, scheme: str = "q4", dtype: torch.dtype = torch.float32) -> LlamaPacking:
    assert EXTENSION is not None
    if path.is_file():
        file = GgufFile(path)
        config, source = LlamaConfig.from_dict(read_config(file)), LlamaLikeSource(file)
    else:
        content = read_json(path / "config.json")
        config, source = LlamaConfig.from_dict(content), open_source(SafetensorsSource(path), content)
    return LlamaPacking(source, config, dtype, scheme, EXTENSION, lambda done, total: None)


def bits(packed: PackedWeights | None) -> dict[str, tuple[Any, ...]]:
    """All that a decoder is given."""
    assert packed is not None
    found: dict[str, tuple[Any, ...]] = {"all": (packed.describe(), packed.arithmetic())}
    for name, tensor in packed.tensors.items():
        data = tensor.data if isinstance(tensor, NativeMatrix) else tensor
        kind: tuple[Any, ...] = (tuple(data.shape), data.dtype)
        if isinstance(tensor, NativeMatrix):
            weight = tensor.weight
            kind = (weight.format, weight.rows, weight.cols, weight.inputs)
        found[name] = (*kind, bytes(data.contiguous().view(-1).view(torch.uint8).numpy()))
    return found


class Counted:
    """A packing that counts how often it was written to a file."""

    def __init__(self, packing: Packing, before: Callable[[], object] = lambda: None) -> None:
        self.packing = packing
        self.scheme, self.extension = packing.scheme, packing.extension
        self.times = 0
        self._before = before

    def get(self, cache: PackedCache, key: dict[str, Any] = KEY) -> PackedWeights | None:
        return cache.get("tiny", key, self)

    def in_memory(self) -> PackedWeights:
        return self.packing.in_memory()

    def sizes(self) -> list[int]:
        return self.packing.sizes()

    def into(self, file: PackedFileWriter) -> Mapping[str, Place]:
        self.times += 1
        self._before()
        return self.packing.into(file)


def never(packing: LlamaPacking) -> Counted:
    """One that may not pack."""
    return Counted(packing, lambda: pytest.fail("packed anew"))


@pytest.fixture
def counted(tiny) -> Counted:
    return Counted(packing_of(tiny("llama").directory))


@pytest.fixture
def cache(tmp_path) -> PackedCache:
    return PackedCache(tmp_path / "packed", ROOM)


FORMS = [
    (model, scheme, dtype)
    for model in ("qwen2", "llama-wide", "phi3-wide", "Q4_0", "Q8_0", "Q4_1", "AWQ")
    for scheme in ("auto", "none", "q8", "q4-a8")
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(("model", "scheme", "dtype"), some(FORMS, FORMS[::3]))
def test_weights_from_a_file_have_the_bits_of_those_in_memory(
    tiny, tmp_path, monkeypatch, every_isa, cache, model, scheme, dtype
) -> None:
    monkeypatch.setattr(packed_file, "CHUNK_BYTES", 1 << 14)
    path = tiny(model if model.islower() else "llama-wide").directory
    if model == "AWQ":
        write_codes(path, path := tmp_path / "codes", FORMS_OF_CODES["awq"])
    elif not model.islower():
        write_gguf(path, path := tmp_path / "model.gguf", model)
    expected = bits(packing_of(path, scheme, dtype).in_memory())
    for isa in every_isa:
        native.load().select_isa(isa)
        assert bits(packing_of(path, scheme, dtype).in_memory()) == expected
    assert bits(Counted(packing_of(path, scheme, dtype)).get(cache)) == expected
    places = open_packed(cache.path("tiny", KEY), KEY, scheme, EXTENSION)[0].tensors.values()
    written = [each.data if isinstance(each, NativeMatrix) else each for each in places]
    assert sorted(packing_of(path, scheme, dtype).sizes()) == sorted(each.nbytes for each in written)
    for huge in (0, ROOM):  # copied, or mapped
        monkeypatch.setattr(packed_file, "_huge_bytes", lambda address, huge=huge: huge)
        assert bits(never(packing_of(path, scheme, dtype)).get(cache)) == expected


def test_workers_share_the_pages_of_the_file(counted, cache, monkeypatch) -> None:
    """A tensor lies in a mapping of the file that is read-only and shared: the system keeps its pages once for all."""
    monkeypatch.setattr(packed_file, "_huge_bytes", lambda address: ROOM)
    packed = counted.get(cache)
    mappings = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    of_file = [each for each in mappings if each[-1] == str(cache.path("tiny", KEY))]
    assert {each[1] for each in of_file} == {"r--s"}
    spans = [[int(end, 16) for end in each[0].split("-")] for each in of_file]
    for tensor in packed.tensors.values():
        data = tensor.data if isinstance(tensor, NativeMatrix) else tensor
        assert any(begin <= data.data_ptr() < data.data_ptr() + data.nbytes <= end for begin, end in spans)


def test_inputs_of_8_bits_share_the_file_of_the_same_weights(tiny, cache) -> None:
    path = tiny("llama-wide").directory
    Counted(packing_of(path, "q4")).get(cache)
    found = never(packing_of(path, "q4-a8")).get(cache)
    assert bits(found) == bits(packing_of(path, "q4-a8").in_memory()) != bits(packing_of(path, "q4").in_memory())


DAMAGES: dict[str, Callable[[bytes, int], bytes]] = {
    "flip": lambda whole, place: (
        whole[: place // 8] + bytes([whole[place // 8] ^ 1 << place % 8]) + whole[place // 8 + 1 :]
    ),
    "cut": lambda whole, place: whole[: place // 8],
    "longer": lambda whole, place: whole + whole[: 1 + place % 100],
    "zeros": lambda whole, place: (whole[: place // 8] + bytes(4096) + whole[place // 8 + 4096 :])[: len(whole)],
    "swap": lambda whole, place: whole[place // 8 :] + whole[: place // 8],
}


@settings(deadline=None, max_examples=draws(30, 2000), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_is_noticed(counted, cache, data) -> None:
    expected = bits(counted.get(cache))
    path = cache.path("tiny", KEY)
    whole = path.read_bytes()
    kind, place = data.draw(st.sampled_from(list(DAMAGES))), data.draw(st.integers(0, 8 * len(whole) - 1))
    damaged, before = DAMAGES[kind](whole, place), counted.times
    path.write_bytes(damaged)
    assert bits(counted.get(cache)) == expected
    assert counted.times - before == (damaged != whole)
    assert path.read_bytes() == whole


def test_chunks_that_changed_places_are_noticed(counted, cache, monkeypatch) -> None:
    monkeypatch.setattr(packed_file, "CHUNK_BYTES", 1 << 10)
    counted.get(cache)
    whole = (path := cache.path("tiny", KEY)).read_bytes()
    path.write_bytes(whole[1024:2048] + whole[:1024] + whole[2048:])
    counted.get(cache)
    assert counted.times == 2


FOREIGN: dict[str, Callable[[Path], object]] = {
    "others may write": lambda path: path.chmod(0o602),
    "a group may write": lambda path: path.chmod(0o660),
    "link": lambda path: path.symlink_to(path.rename(path.with_name("elsewhere"))),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "another user's": lambda path: None,
    "another model's": lambda path: path.write_bytes(path.with_name("other").read_bytes()),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_that_somebody_else_may_have_made_is_not_used(tiny, counted, cache, kind, monkeypatch) -> None:
    expected = bits(counted.get(cache))
    Counted(packing_of(tiny("qwen2").directory)).get(cache, {"of": "another"})
    path = cache.path("tiny", KEY)
    cache.path("tiny", {"of": "another"}).rename(path.with_name("other"))
    if kind == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    FOREIGN[kind](path)
    found = counted.get(cache)
    assert counted.times == 2
    assert found is None or bits(found) == expected


def test_of_two_that_start_at_once_one_packs(counted, cache) -> None:
    counted._before = lambda: time.sleep(0.3)
    with ThreadPoolExecutor(3) as threads:
        found = [bits(each) for each in threads.map(counted.get, [cache] * 3)]
    assert counted.times == 1
    assert found == [bits(counted.packing.in_memory())] * 3


def test_who_waited_too_long_packs_for_itself(counted, cache, monkeypatch) -> None:
    monkeypatch.setattr(packed_cache, "LONGEST_WAIT_S", 0.1)
    cache.path("tiny", KEY).parent.mkdir()
    with cache._turn():
        assert counted.get(cache) is None


def test_what_a_killed_process_left_is_in_nobodys_way(counted, cache) -> None:
    part = cache.path("tiny", KEY).with_suffix(".part")
    part.parent.mkdir()
    part.write_bytes(b"half")
    assert bits(counted.get(cache)) == bits(counted.packing.in_memory())
    assert not part.exists()


@pytest.mark.parametrize("failing", ["write", "fsync", "replace", "mkdir"])
def test_a_disk_that_fails_leaves_nothing(counted, cache, tmp_path, monkeypatch, failing) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(*(Path, "mkdir") if failing == "mkdir" else (os, failing), fail)
    assert counted.get(cache) is None
    assert not list(tmp_path.glob("packed/tiny*"))


@settings(deadline=None, max_examples=draws(10, 200))
@given(keys=st.lists(st.integers(0, 5), min_size=1, max_size=12), fit=st.integers(0, 3))
def test_the_folder_stays_within_its_bound(tiny, tmp_path_factory, keys, fit) -> None:
    counted, folder = Counted(packing_of(tiny("llama").directory)), tmp_path_factory.mktemp("cache")
    counted.get(PackedCache(folder, ROOM), {"n": -1})
    (sample,) = folder.glob("*.packed")
    size = sample.stat().st_size
    sample.unlink()
    cache, used = PackedCache(folder, size * fit + size // 2), []
    for now, key in enumerate(keys):
        assert (counted.get(cache, {"n": key}) is None) == (fit == 0)
        used = [*(each for each in used if each != key), key][-fit:] if fit else []
        for place in used[-1:]:
            os.utime(cache.path("tiny", {"n": place}), (now, now))
        assert set(folder.glob("tiny*")) == {cache.path("tiny", {"n": each}) for each in used}


def test_nothing_is_removed_or_written_for_what_does_not_fit(tiny, tmp_path, monkeypatch, caplog) -> None:
    counted, folder = Counted(packing_of(tiny("llama").directory)), tmp_path / "packed"
    folder.mkdir()
    size = sum(counted.sizes())
    other = folder / "other.packed"
    other.write_bytes(bytes(100))
    assert counted.get(PackedCache(folder, size - 1)) is None
    monkeypatch.setattr(packed_cache, "KEPT_FREE", 1 << 60)
    assert counted.get(PackedCache(folder, 2 * size)) is None
    assert other.exists()
    assert counted.times == 0
    assert f"more than packed_cache_bytes ({size - 1})" in caplog.text
    assert "--packed-cache-bytes" in caplog.text


def test_the_content_key_changes_with_the_weights_and_what_decides(tmp_path) -> None:
    weights, config = tmp_path / "w", tmp_path / "config.json"
    weights.write_bytes(b"0123")
    config.write_text("{}")
    stat = weights.stat()
    seen = [content_key([weights], [config])]
    for change in (
        lambda: config.write_text("{ }"),
        lambda: (weights.write_bytes(b"0124"), os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))),
        lambda: os.utime(weights, ns=(0, 0)),
    ):
        change()
        seen.append(content_key([weights], [config]))
    assert len({str(each) for each in seen}) == 4
