"""A part of `make same-bits`: whatever is continued after a fault has the bits of an undisturbed run."""

from dataclasses import replace

import pytest
import torch
from effort import diagonal
from instruction_sets import ISAS
from same_bits import FAULTS, Case, Engines, draw_cases, load_engines, text_of
from same_drafts import DraftedEngines, drafted_cases
from tiny_llama import CPU, Form, tiny_llama

from gpu_worker.ops import choose_ops, native

pytestmark = pytest.mark.skipif(native.load() is None, reason="the reference ops are not batch-invariant")
FORM = Form(context=2048, block_size=16)
TEXT = [(i * 37 + i // 96 * 11) % 96 for i in range(8000)]


@pytest.fixture(scope="module")
def tiny_engines() -> Engines:
    return Engines([tiny_llama(FORM, choose_ops(CPU), num_blocks=600, num_host_blocks=600).runner for _ in range(2)])


def across(cases: list[Case]) -> list[Case]:
    """Some that cross 1,024 keys by their output, and some that are beyond from the start."""
    return [
        replace(case, prompt=case.prompt[: 1010 + 7 * index] if index % 2 == 0 else case.prompt)
        for index, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("fault", "isa"), diagonal(FAULTS, ISAS[1:]), indirect=["isa"])
def test_a_continued_sequence_has_the_same_bits(tiny_engines: Engines, isa: str, fault: str) -> None:
    torch.set_num_threads(1)
    drawn = draw_cases(TEXT, 20, 3, (1060, 1500), (24, 40))
    cases = across([case for case in drawn if case.fault == fault])
    assert {case.kind for case in cases} == {"greedy", "seeded", "greedy, logprobs", "seeded, logprobs"}
    for compared in tiny_engines.compare(cases):
        assert (compared.wrong_tokens, compared.wrong_scores) == (0, 0), compared.case
        assert len(compared.case.prompt) + compared.num_tokens > 1024


@pytest.mark.parametrize(("fault", "isa"), diagonal(FAULTS, ISAS[1:]), indirect=["isa"])
def test_a_sequence_with_drafts_has_the_same_bits(tiny_engines: Engines, isa: str, fault: str) -> None:
    torch.set_num_threads(1)
    engines = DraftedEngines(tiny_engines._runners)
    drawn = drafted_cases(TEXT, 20, 4, (1060, 1500), (24, 40))
    cases = across([case for case in drawn if case.fault == fault][:2])
    for compared in engines.compare(cases):
        assert (compared.wrong_tokens, compared.wrong_scores) == (0, 0), compared.case
    engines.count_drafts()
    assert engines.tally["accepted"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("demo_model")
def test_the_demo_model_has_them_too() -> None:
    engines = load_engines("smollm2", 1, 1100)
    drawn = draw_cases(text_of(engines.info.tokenizer), 5, 1, (1040, 1050), (30, 31))
    [compared] = engines.compare([case for case in drawn if case.fault == "kill"])
    assert compared.num_scores and (compared.wrong_tokens, compared.wrong_scores) == (0, 0)
