"""How the first endpoint compares with the one of --against, over the rounds that both have finished."""

import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from octavo.cli.bench.measurement import RoundMeasurement
from octavo.cli.bench.objective import ServiceObjective
from octavo.cli.bench.statistics import paired_ratio
from octavo.cli.bench.summary import summarize

# The compared figures: their path in a summary, and which value is the better one.
COMPARED = {
    ("requests_per_s",): "higher",
    ("output_tokens_per_s",): "higher",
    ("ttft_ms", "p50"): "lower",
    ("ttft_ms", "p99"): "lower",
    ("itl_ms", "p50"): "lower",
    ("itl_ms", "p99"): "lower",
    ("tpot_ms", "p50"): "lower",
    ("e2e_ms", "p50"): "lower",
    ("e2e_ms", "p99"): "lower",
    ("goodput", "requests_per_s"): "higher",
}


def compare(
    rounds: Sequence[Sequence[RoundMeasurement]], objective: ServiceObjective | None, seed: int
) -> dict[str, dict[str, Any]]:
    """By figure (`ttft_ms.p50`): the ratio A/B with its interval and its extremes."""
    pairs = [
        [summarize([each], objective) for each in pair]
        for pair in zip(*rounds, strict=False)
        if not any(each.cut for each in pair)
    ]
    found = {}
    for path, better in COMPARED.items():
        values = [(value_at(first, path), value_at(second, path)) for first, second in pairs]
        known = [(first, second) for first, second in values if first is not None and second is not None]
        ratio = paired_ratio(known, random.Random(f"{seed}/{path}"))
        if ratio is not None:
            plain = {name: round(value, 5) if value is not None else None for name, value in asdict(ratio).items()}
            found[".".join(path)] = {**plain, "better": better}
    return found


def value_at(summary: dict[str, Any], path: Sequence[str]) -> float | None:
    """The figure at a path of a summary; None if there is none."""
    value: Any = summary
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return None if value is None else float(value)
