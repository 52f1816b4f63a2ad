"""What a runner is loaded with where nothing is said."""

import inspect
from pathlib import Path

import pytest

from gpu_worker.running import loading
from octavo.settings.worker import WorkerSettings


def test_a_user_without_a_home_directory_has_no_cache_of_weights(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert loading.default_cache() == tmp_path / ".cache" / "octavo"

    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    assert loading.default_cache() is None


def test_mixed_steps_are_captured_unless_told_otherwise():
    for default in (
        WorkerSettings().cuda_graphs,
        inspect.signature(loading.load_runner).parameters["cuda_graphs"].default,
    ):
        assert loading.mixed_tokens(default, 512) == 512


@pytest.mark.parametrize("said", ["decodes", "off"])
def test_mixed_steps_run_eagerly_where_that_is_asked(said):
    assert loading.mixed_tokens(said, 512) == 0
