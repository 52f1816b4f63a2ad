"""Whatever a model is made of: what goes on after a fault has the tokens of an undisturbed run, and the bits of their
log probabilities where its kind promises them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import migration_benches
import pytest
import torch
from effort import some
from model_kinds import KINDS
from same_bits import FAULTS, Answer, Case, Comparison, Engine, Engines, draw_cases

from gpu_worker.ops import native
from gpu_worker.running.loading import load_runner
from gpu_worker.scheduling.state.sequence import Sequence
from octavo.request.ids import BlockId

pytestmark = pytest.mark.skipif(native.load() is None, reason="the reference ops are not batch-invariant")
TEXT = [(i * 37 + i // 96 * 11) % 128 for i in range(800)]
USUAL = ("gguf q4_k q6_k", "awq", "gptq", "int8", "mxfp4", "mixtral")
SIZES = {"block_size": 8, "kv_cache_bytes": 1 << 22, "swap_bytes": 1 << 21, "threads": 1}


class AdaptedEngine(Engine):
    """Each of its sequences has the first adapter of its runner."""

    def new(self, *args: Any, **fields: Any) -> Sequence:
        sequence = super().new(*args, **fields)
        sequence.adapter = 1
        return sequence


@pytest.fixture
def engines(tmp_path: Path) -> Callable[[str], Engines]:
    """Two workers of a kind of model."""

    def load(name: str) -> Engines:
        torch.set_num_threads(1)
        kind = KINDS[name]
        path = kind.write(tmp_path)
        runners = [load_runner(str(path), cache_dir=tmp_path / "cache", **SIZES, **kind.options) for _ in range(2)]
        for runner in runners:
            assert runner.info.piece_invariant == kind.same_bits, "docs/promises.md says otherwise"
            assert kind.numbers in runner._decoder.name, "another format than that which is tested here"
            if kind.adapter:
                assert runner.adapters.add(runner.adapters.read(str(path / kind.adapter), "", 1 << 20)) == 1
        return Engines(runners, AdaptedEngine if kind.adapter else Engine)

    return load


def drawn(fault: str) -> list[Case]:
    """A greedy sequence and a seeded one, both with log probabilities."""
    cases = [case for case in draw_cases(TEXT, 2 * len(FAULTS), 3, (40, 60), (12, 20)) if case.fault == fault]
    assert [case.kind for case in cases] == ["greedy, logprobs", "seeded, logprobs"]
    return [replace(case, step_tokens=min(case.step_tokens, 64)) for case in cases]


def wrong(compared: list[Comparison]) -> tuple[int, int]:
    return sum(each.wrong_tokens for each in compared), sum(each.wrong_scores for each in compared)


@pytest.mark.parametrize("name", some(KINDS, USUAL))
def test_a_kind_has_its_tokens_after_each_fault(name: str, engines: Callable[[str], Engines]) -> None:
    two = engines(name)
    for fault in FAULTS:
        compared = two.compare(drawn(fault))
        assert all(each.num_tokens and each.num_scores for each in compared)
        assert wrong(compared)[0] == 0, fault
        assert not KINDS[name].same_bits or wrong(compared)[1] == 0, fault


def test_blocks_that_arrive_with_the_content_of_another_are_seen(engines, monkeypatch) -> None:
    copied, first = migration_benches.copy_block, list[BlockId]()

    def copy(source: Engine, target: Engine, block: BlockId, place: BlockId) -> None:
        first.append(block)
        copied(source, target, first[0], place)

    monkeypatch.setattr(migration_benches, "copy_block", copy)
    assert all(wrong(engines("mixtral").compare(drawn("migration"))))


def test_a_history_with_another_token_is_seen(engines) -> None:
    two, cases = engines("mixtral"), drawn("kill")
    whole = two.undisturbed(cases)
    other = {name: Answer([each.tokens[0] ^ 1, *each.tokens[1:]]) for name, each in whole.items()}
    continued = two.continued(cases, other)
    for case in cases:
        assert continued[case.name].tokens[case.at :] != whole[case.name].tokens[case.at :]
