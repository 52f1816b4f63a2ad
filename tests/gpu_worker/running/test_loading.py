"""What a runner is loaded with where nothing is said."""

from pathlib import Path

from gpu_worker.running import loading


def test_a_user_without_a_home_directory_has_no_cache_of_weights(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert loading.default_cache() == tmp_path / ".cache" / "octavo"

    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    assert loading.default_cache() is None
