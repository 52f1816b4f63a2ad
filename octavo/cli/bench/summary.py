"""The figures of an endpoint: of one round, or of all its rounds together."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from octavo.cli.bench.measurement import INTERRUPTED, RequestMeasurement, RoundMeasurement
from octavo.cli.bench.objective import ServiceObjective
from octavo.cli.bench.statistics import spread_of

MS = 1000.0


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
    """How many requests failed for each reason, the most frequent first, with the message of the first one."""
    failed = [request for request in requests if request.reason not in ("", INTERRUPTED)]
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
