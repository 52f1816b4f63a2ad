"""The figures of an endpoint, of one round or of all its rounds together, and how two endpoints compare."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo_bench.measurement import INTERRUPTED, RequestMeasurement, RoundMeasurement

MS = 1000.0
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
RESAMPLES = 4000
CONFIDENCE = 0.95
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
NAMES = ("ttft", "itl", "tpot", "e2e")
ITL_QUANTILE = 0.99  # this share of a request's gaps must keep the limit of itl
EXAMPLE = "ttft=500ms,itl=50ms"
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


def percentile(ordered: Sequence[float], quantile: float) -> float:
    """The quantile of sorted values, by linear interpolation between the two nearest, as numpy does by default."""
    place = quantile * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread_of(values: Sequence[float], scale: float = 1.0) -> dict[str, float] | None:
    """Mean, percentiles and maximum, times `scale`; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    found = {"mean": math.fsum(ordered) / len(ordered)}
    found |= {name: percentile(ordered, quantile) for name, quantile in QUANTILES.items()}
    found["max"] = ordered[-1]
    return {name: round(value * scale, 4) for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """The first endpoint's value divided by the other's, over rounds in which both took turns.

    `ratio` is the geometric mean over the rounds, `low` and `high` the bounds of its 95 % confidence interval (none
    with a single round), `smallest` and `largest` the most extreme rounds.
    """

    ratio: float
    low: float | None
    high: float | None
    smallest: float
    largest: float
    num_rounds: int


def paired_ratio(pairs: Sequence[tuple[float, float]], rng: random.Random) -> PairedRatio | None:
    """The ratio over pairs of values of one round each; None if no pair has two values above 0.

    The interval is a percentile bootstrap over rounds: a round is drawn with both of its values, so what disturbed both
    endpoints alike does not widen it.
    """
    logs = [math.log(first / second) for first, second in pairs if first > 0 and second > 0]
    if not logs:
        return None
    low = high = None
    if len(logs) > 1:
        means = sorted(math.fsum(rng.choices(logs, k=len(logs))) / len(logs) for _ in range(RESAMPLES))
        tail = (1 - CONFIDENCE) / 2
        low, high = math.exp(percentile(means, tail)), math.exp(percentile(means, 1 - tail))
    ratio = math.exp(math.fsum(logs) / len(logs))
    return PairedRatio(ratio, low, high, math.exp(min(logs)), math.exp(max(logs)), len(logs))


@dataclass(frozen=True, slots=True)
class ServiceObjective:
    """Limits in seconds by name: ttft, itl (99 % of the gaps between events of the request), tpot, e2e."""

    limits: dict[str, float]

    def is_kept_by(self, request: RequestMeasurement) -> bool:
        """Whether it is completed and kept every limit. A request with a single event has no gap that is too long."""
        gaps = sorted(request.event_gaps)
        values = {
            "ttft": request.ttft_s,
            "itl": percentile(gaps, ITL_QUANTILE) if gaps else 0.0,
            "tpot": request.tpot_s or 0.0,
            "e2e": request.e2e_s,
        }
        return request.completed and all(
            (value := values[name]) is not None and value <= limit for name, limit in self.limits.items()
        )


def parse_objective(text: str) -> ServiceObjective:
    """The objective that a text such as `ttft=500ms,itl=50ms` names. Raises ValueError with the form."""
    limits = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in NAMES:
            raise ValueError(f"{name!r} is none of {', '.join(NAMES)}; write --slo {EXAMPLE}")
        limits[name] = _seconds(value)
    return ServiceObjective(limits)


def _seconds(text: str) -> float:
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    try:
        value = float(text.removesuffix(unit)) * UNITS[unit]
    except (KeyError, ValueError):
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} is no time with a unit, such as 500ms or 2s; write --slo {EXAMPLE}")
    return value


def summarize(rounds: Sequence[RoundMeasurement], objective: ServiceObjective | None) -> dict[str, Any]:
    """Plain values for JSON. Rates divide by the time of the rounds; latencies are those of completed requests.

    Tokens of requests that Ctrl-C cut count for the rates, since the time in which they came counts, too. Tokens of
    failed requests do not.
    """
    requests = [request for each in rounds for request in each.requests]
    done = [request for request in requests if request.completed]
    cut = [request for request in requests if request.reason == INTERRUPTED]
    seconds = math.fsum(each.seconds for each in rounds)
    output_tokens = sum(request.output_tokens for request in [*done, *cut])
    prompt_tokens = _told(done, "prompt_tokens")
    num_events = sum(request.num_events for request in done)
    return {
        "requests": len(requests),
        "completed": len(done),
        "failed": len(requests) - len(done) - len(cut),
        "interrupted": len(cut),
        "failures": failures(requests),
        "seconds": round(seconds, 4),
        "requests_per_s": rate(len(done), seconds),
        "output_tokens": output_tokens,
        "output_tokens_per_s": rate(output_tokens, seconds),
        "prompt_tokens": prompt_tokens,
        "total_tokens_per_s": None if prompt_tokens is None else rate(output_tokens + prompt_tokens, seconds),
        "cached_tokens": _told(done, "cached_tokens"),
        "mean_prompt_tokens": None if prompt_tokens is None else round(prompt_tokens / max(len(done), 1), 2),
        "mean_output_tokens": round(sum(r.output_tokens for r in done) / len(done), 2) if done else None,
        "short_answers": sum(request.output_tokens < request.wanted_tokens for request in done),
        "mean_in_flight": rate(math.fsum(request.e2e_s for request in done), seconds),
        "ttft_ms": spread_of([request.ttft_s for request in done if request.ttft_s is not None], MS),
        "itl_ms": spread_of([gap for request in done for gap in request.event_gaps], MS),
        "tpot_ms": spread_of([request.tpot_s for request in done if request.tpot_s is not None], MS),
        "e2e_ms": spread_of([request.e2e_s for request in done], MS),
        "tokens_per_event": round(sum(r.output_tokens for r in done) / num_events, 3) if num_events else None,
        "counted_by": dict(sorted(Counter(request.counted_by for request in done).items())),
        "goodput": _goodput(requests, seconds, objective),
        "generator": _generator(rounds, requests, seconds),
    }


def rate(amount: float, seconds: float) -> float:
    return round(amount / seconds, 4) if seconds > 0 else 0.0


def failures(requests: Sequence[RequestMeasurement]) -> dict[str, dict[str, Any]]:
    """By reason, the most frequent first: how many requests failed so, and what the first of them was told."""
    failed = [request for request in requests if request.has_failed]
    examples = {request.reason: request.message for request in reversed(failed)}
    counts = Counter(request.reason for request in failed)
    return {reason: {"count": number, "example": examples[reason]} for reason, number in counts.most_common()}


def _told(requests: Sequence[RequestMeasurement], name: str) -> int | None:
    """The sum of a number that the endpoint reported for each request; None if it reported none."""
    told = [getattr(request.totals, name) for request in requests if request.totals is not None]
    known = [value for value in told if value is not None]
    return sum(known) if known else None


def _goodput(
    requests: Sequence[RequestMeasurement], seconds: float, objective: ServiceObjective | None
) -> dict[str, Any] | None:
    """Requests that kept the SLO. A failed request has not kept it; one that Ctrl-C cut is left out."""
    if objective is None:
        return None
    ended = [request for request in requests if request.reason != INTERRUPTED]
    kept = sum(objective.is_kept_by(request) for request in ended)
    return {
        "slo_ms": {name: round(limit * MS, 4) for name, limit in objective.limits.items()},
        "requests": kept,
        "requests_per_s": rate(kept, seconds),
        "share": round(kept / len(ended), 4) if ended else 0.0,
    }


def _generator(
    rounds: Sequence[RoundMeasurement], requests: Sequence[RequestMeasurement], seconds: float
) -> dict[str, Any]:
    """How busy and how late the generator itself was: `cpu_share` is the part of one core that it used."""
    return {
        "cpu_share": rate(math.fsum(each.cpu_s for each in rounds), seconds),
        "lateness_ms": spread_of([request.lateness_s for request in requests], MS),
        "loop_lag_ms": spread_of([lag for each in rounds for lag in each.loop_lags], MS),
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
