"""From logits to tokens, in kernels.py: draws and scores; against what torch needs for the same."""

from collections.abc import Callable
from types import ModuleType

import torch
from _table import Plan, Table, Work, clocked
from torch import Tensor

VOCAB = 49152
TOP_K, TOP_P = 50, 0.9
NUM_TOP = 5
Call = Callable[[], object]


def draws(extension: ModuleType, plan: Plan) -> None:
    table = Table(plan, f"From logits to tokens, vocabulary {VOCAB}, peaked as in text, float32")
    for rows in (16,) if plan.quick else (1, 16, 48):
        logits = -1.5 * torch.log1p(torch.rand(rows, VOCAB).argsort(dim=-1).float())
        for name, (ours, theirs) in calls(extension, logits).items():
            sides = {"octavo": clocked(ours), "torch": clocked(theirs)}
            table.row(f"{name}, {rows} rows", Work(4 * logits.numel()), sides)


def calls(extension: ModuleType, logits: Tensor) -> dict[str, tuple[Call, Call]]:
    ids = torch.empty(len(logits), dtype=torch.int64)
    targets = torch.zeros(len(logits), dtype=torch.int64)
    size = len(logits), NUM_TOP
    found = {"counts": torch.full(size[:1], NUM_TOP, dtype=torch.int32), "logprobs": torch.empty(size[:1])}
    found |= {"top_ids": torch.empty(size, dtype=torch.int64), "top_logprobs": torch.empty(size)}

    def sample(**choices: float) -> Call:
        settings = columns(len(logits), **choices)
        return lambda: extension.sample(ids, logits, **settings)

    def scored() -> None:
        chances = logits.log_softmax(-1)
        chances.topk(NUM_TOP)
        chances.gather(1, targets[:, None])

    return {
        "sample": (sample(), lambda: torch.softmax(logits / 0.8, -1).multinomial(1)),
        f"sample, top-k {TOP_K}": (sample(top_k=TOP_K), lambda: among_likeliest(logits)),
        f"sample, top-p {TOP_P}": (sample(top_p=TOP_P), lambda: within_mass(logits)),
        f"score, {NUM_TOP} likeliest": (lambda: extension.score(logits, targets, **found), scored),
    }


def columns(rows: int, top_k: int = 0, top_p: float = 1.0) -> dict[str, Tensor]:
    """What `sample` is told of each row."""
    zeros = torch.zeros(rows, dtype=torch.int64)
    return {
        "rows": torch.arange(rows),
        "temperature": torch.full((rows,), 0.8),
        "top_k": torch.full((rows,), top_k, dtype=torch.int32),
        "top_p": torch.full((rows,), top_p),
        "min_p": torch.zeros(rows),
        "seed": torch.arange(rows),
        "branch": zeros,
        "index": zeros,
    }


def among_likeliest(logits: Tensor) -> Tensor:
    values, ids = (logits / 0.8).topk(TOP_K)
    return ids.gather(1, torch.softmax(values, -1).multinomial(1))


def within_mass(logits: Tensor) -> Tensor:
    values, ids = (logits / 0.8).sort(dim=-1, descending=True)
    chances = torch.softmax(values, -1)
    chances[chances.cumsum(-1) - chances > TOP_P] = 0
    return ids.gather(1, chances.multinomial(1))
