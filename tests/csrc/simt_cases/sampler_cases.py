"""The worker's sampler over the kernels, beside its definition."""

import dataclasses
from typing import Any

import _C_cuda_simt as native
import numpy as np


def sampler_case(rng: Any) -> None:
    """Batches of any requests: the same tokens, and the same scores but for rounding."""
    import torch

    from gpu_worker.sampling.cuda_sampler import CudaSampler
    from gpu_worker.sampling.sampler import Sampler

    torch.set_num_threads(1)
    vocabulary = int(rng.choice([40, 700]))
    ours = CudaSampler(native, vocabulary, torch.device("cpu"), (2,))
    theirs = Sampler(vocabulary, "cpu", (2,))
    branches = [branch(rng, vocabulary) for _ in range(int(rng.integers(1, 7)))]
    dtype = [torch.float32, torch.bfloat16][int(rng.integers(2))]
    for _ in range(3):  # the same branches come again, one token further
        x = rng.normal(0, 4, (len(branches) + 1, vocabulary))
        if rng.random() < 0.4:
            x[int(rng.integers(len(x))), int(rng.integers(vocabulary))] = rng.choice([np.nan, np.inf, -np.inf])
        if rng.random() < 0.1:
            x[0] = -np.inf
        logits = torch.from_numpy(x).to(dtype)
        whole = rng.random() < 0.5
        rows = list(range(len(branches))) if whole else rng.integers(0, len(x), len(branches)).tolist()
        before = logits.clone()
        got, want = (each.sample(logits, rows, branches) for each in (ours, theirs))
        assert torch.equal(logits, before) or logits.isnan().any()
        assert got[0] == want[0], f"{got[0]} {want[0]} {[b.sequence.params for b in branches]}"
        assert got[1].keys() == want[1].keys()
        for i, score in got[1].items():
            same(score, want[1][i])
        targets = rng.integers(0, vocabulary, len(x)).tolist()
        num_top = int(rng.choice([0, 3]))
        for score, other in zip(
            ours.score(logits, targets, num_top), theirs.score(logits, targets, num_top), strict=True
        ):
            same(score, other)
        for each, token in zip(branches, got[0], strict=True):
            each.tokens.append(max(token, 0))


def same(got: Any, want: Any) -> None:
    assert got.token_id == want.token_id and (got.raw is None) == (want.raw is None)
    assert np.isclose(got.logprob, want.logprob, atol=1e-4, equal_nan=True), (got, want)
    assert got.raw is None or np.isclose(got.raw, want.raw, atol=1e-4), (got, want)
    assert [token for token, _ in got.top] == [token for token, _ in want.top], (got, want)
    assert np.allclose([value for _, value in got.top], [value for _, value in want.top], atol=1e-4)


def branch(rng: Any, vocabulary: int) -> Any:
    from gpu_worker.steps.mask import Mask
    from gpu_worker.steps.seats import Seat
    from octavo.request.sampling import SamplingParams

    def maybe(value: Any, chance: float = 0.3) -> Any:
        return value() if rng.random() < chance else None

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, vocabulary + 5, int(rng.integers(1, most))).tolist())

    wanted = {
        "temperature": maybe(lambda: 0.0) if rng.random() < 0.5 else float(rng.choice([0.3, 1, 1e-40])),
        "top_k": maybe(lambda: int(rng.integers(0, 50))),
        "top_p": maybe(lambda: float(rng.uniform(0.1, 1))),
        "min_p": maybe(lambda: float(rng.uniform(0, 0.3))),
        "repetition_penalty": maybe(lambda: float(rng.uniform(0.5, 2))),
        "presence_penalty": maybe(lambda: float(rng.uniform(-2, 2))),
        "frequency_penalty": maybe(lambda: float(rng.uniform(-2, 2))),
        "logit_bias": maybe(lambda: {token: float(rng.uniform(-9, 9)) for token in ids(9)}),
        "allowed_token_ids": maybe(lambda: ids(20), 0.15),
        "banned_token_ids": maybe(lambda: ids(20), 0.2),
        "banned_sequences": maybe(lambda: tuple((token,) for token in ids(5)), 0.2),
        "min_tokens": maybe(lambda: 5),
        "logprobs": maybe(lambda: int(rng.integers(0, 6))),
        "best_of": maybe(lambda: 3, 0.15),
    }
    params = SamplingParams(seed=int(rng.integers(2**63)), **{k: v for k, v in wanted.items() if v is not None})
    prompt = rng.integers(0, vocabulary, int(rng.integers(1, 9))).tolist()
    params = dataclasses.replace(params, seed=params.seed or 0)
    output = rng.integers(0, vocabulary, int(rng.integers(0, 4))).tolist()
    seat = Seat(params, [*prompt, *output], len(prompt), int(rng.integers(3)))
    seat.mask = maybe(
        lambda: Mask.of(np.packbits(rng.random(vocabulary) < rng.choice([0, 0.02, 0.5]), bitorder="little").tobytes())
    )
    return seat
