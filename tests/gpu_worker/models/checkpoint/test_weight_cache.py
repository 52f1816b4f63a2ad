"""The cache of converted weights: what comes back is what was kept, or nothing does."""

import torch

from gpu_worker.models.checkpoint.weight_cache import WeightCache

TENSORS = {"a": torch.arange(5000.0).view(50, 100), "b": torch.ones(3, dtype=torch.bfloat16)}


def zeroed(content: bytes) -> bytes:
    start = 108 + int.from_bytes(content[:8], "little")
    return content[:start] + bytes(100) + content[start + 100 :]


DAMAGES = {
    "cut": lambda content: content[:-10],
    "empty": lambda content: b"",
    "header": lambda content: b"\xff" * 8 + content[8:],
    "first": zeroed,
    "last": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
}


def test_damaged_files_are_taken_for_none_and_written_anew(tmp_path):
    cache = WeightCache(tmp_path / "cache")
    assert cache.load("m", "k") is None
    assert cache.store("m", "k", TENSORS)
    path = cache.path("m", "k")
    whole = path.read_bytes()
    assert [each.name for each in path.parent.iterdir()] == ["m-k.safetensors"], "nothing is left lying about"
    for damage in DAMAGES.values():
        path.write_bytes(damage(whole))
        assert cache.load("m", "k") is None
        assert cache.store("m", "k", TENSORS)
        found = cache.load("m", "k")
        assert found is not None and all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    path.rename(cache.path("m", "k2"))
    assert cache.load("m", "k2") is None, "it is that of another key"


def test_no_room_for_the_cache_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert not WeightCache(tmp_path / "file" / "cache").store("m", "k", TENSORS)
