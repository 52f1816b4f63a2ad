"""A model in a folder, and groups that run it."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import random_models
from folder_llama import folder_llama, save_bytes_tokenizer
from guard.processes import exists

from gpu_worker.group.group_runner import GroupRunner
from gpu_worker.group.loading import load_group

SIZES: dict[str, Any] = {
    "threads": 1,
    "block_size": 16,
    "kv_cache_bytes": 40 * 3 * 3 * 2 * 16 * 16 * 4,  # 40 blocks: too few for all, so that some are swapped
    "swap_bytes": 1 << 22,
    "max_batch_tokens": 96,
    "max_batch_sequences": 16,
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def folders(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Models by their kinds and seeds, each made once."""
    made = {("llama", 3): folder}

    def make(kind: str, seed: int = 3) -> Path:
        if (kind, seed) not in made:
            draw = random.Random(seed)
            random_of = random_models.random_gpt if kind in random_models.GPTS else random_models.random_mixture
            saved = random_models.save_random(random_of(draw, kind), tmp_path_factory.mktemp(kind))
            save_bytes_tokenizer(saved)
            made[kind, seed] = saved
        return made[kind, seed]

    return make


@pytest.fixture
def group(folder: Path) -> Iterator[Callable[..., GroupRunner]]:
    """Starts a group of so many ranks. No rank is left when the test ends."""
    with ExitStack() as stack:

        def start(ranks: int, patience_s: float = 20.0, model: Path = folder, **options: object) -> GroupRunner:
            runner = load_group(str(model), ranks=ranks, patience_s=patience_s, **{**SIZES, **options})
            stack.callback(lambda pids: gone(pids), runner.rank_pids)
            stack.callback(runner.close)
            return runner

        yield start


def gone(pids: list[int]) -> None:
    assert not [pid for pid in pids if exists(pid)]
