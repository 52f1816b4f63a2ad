"""A budget for thinking, against a definition that looks at all tokens each time, and on both samplers."""

import random

import pytest
import torch

from gpu_worker.ops import native
from gpu_worker.sampling.native_sampler import NativeSampler
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.sampling.thinking import ThinkingState
from gpu_worker.steps.seats import Seat
from octavo.request.sampling import SamplingParams

VOCAB = 12
SAMPLERS = {"reference": lambda: Sampler(VOCAB, "cpu", ()), "native": lambda: NativeSampler(native.load(), VOCAB, ())}


def expected(params, prompt, output):
    """The forced token, by its definition."""
    tokens, start, end = [*prompt, *output], [*params.thinking_start_ids], [*params.thinking_end_ids]
    began = None if start else len(prompt)
    for length in range(1 if start else len(prompt) + 1, len(tokens) + 1):
        if start and tokens[:length][-len(start) :] == start:
            began = length
        elif tokens[:length][-len(end) :] == end:
            began = None
    if began is None or len(tokens) - max(began, len(prompt)) < params.thinking_budget:
        return None
    matched = max(k for k in range(len(end)) if k == 0 or tokens[-k:] == end[:k])
    return end[matched]


@pytest.mark.parametrize("marks", [((1,), (2,)), ((1, 1), (2, 1, 2)), ((), (2, 3)), ((1,), (2, 2))])
def test_the_forced_token_is_that_of_the_definition(marks):
    chance, num_forced = random.Random(5), 0
    for _ in range(400):
        start, end = marks
        params = SamplingParams(
            thinking_budget=chance.randrange(5), thinking_start_ids=start, thinking_end_ids=end, seed=0
        )
        prompt, output = chance.choices(range(1, 5), k=chance.randrange(1, 6)), []
        branch = Seat(params, [*prompt], len(prompt), 0)
        state = ThinkingState(branch)
        for _ in range(20):
            forced = state.forced()
            assert forced == expected(params, prompt, output) == ThinkingState(branch).forced()
            num_forced += forced is not None
            output.append(chance.randrange(1, 5) if forced is None else forced)
            branch.tokens.append(output[-1])
    assert num_forced > 100


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_samplers_keep_the_budget_whatever_else_is_asked(kind, temperature):
    if kind == "native" and native.load() is None:
        pytest.skip("the extension was not built")
    more = {"banned_token_ids": (9,), "allowed_token_ids": (4, 5), "presence_penalty": 1.0, "min_tokens": 9}
    marks = {"thinking_start_ids": (8,), "thinking_end_ids": (9, 3)}
    params = SamplingParams(thinking_budget=3, temperature=temperature, seed=1, max_tokens=9, **marks, **more)
    sampler, branch, fresh = SAMPLERS[kind](), Seat(params, [4, 8], 2, 0), SAMPLERS[kind]
    for _ in range(9):
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(len(branch.tokens)))
        (token,), _ = sampler.sample(logits, [0], [branch])
        assert fresh().sample(logits, [0], [Seat(params, [*branch.tokens], 2, 0)])[0] == [token], "as after a replay"
        branch.tokens.append(token)
    output = branch.tokens[2:]
    assert output[3:5] == [9, 3]
    assert set(output[:3] + output[5:]) <= {4, 5}
