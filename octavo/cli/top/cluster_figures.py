"""Rates and times of the last minute, from the counts of several views."""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.v1 import admin_pb2

MINUTE_MS = 60_000
RATE_MS = 5_000
SLACK_MS = 200  # views do not come to the millisecond
MAX_SAMPLES = 700


class StepPhases(NamedTuple):
    """Seconds that a worker has spent in each phase of its steps, and the tokens that these computed."""

    plan_s: float
    run_s: float
    commit_s: float
    num_tokens: int

    @property
    def total_s(self) -> float:
        return self.plan_s + self.run_s + self.commit_s


@dataclass(frozen=True, slots=True)
class CountSample:
    """The counts of one view."""

    at_ms: int  # since the router's start
    num_output_tokens: int
    first_token: Counter[float]  # by upper bound
    between_tokens: Counter[float]
    steps: dict[str, StepPhases]  # by incarnation


class ClusterFigures:
    """What has changed between views. A router that has started anew begins anew here, too."""

    def __init__(self) -> None:
        self._samples: deque[CountSample] = deque(maxlen=MAX_SAMPLES)
        self._router_id = ""

    def add(self, view: admin_pb2.WatchClusterResponse) -> None:
        if view.router_id != self._router_id:
            self._samples.clear()
            self._router_id = view.router_id
        self._samples.append(sample_of(view))

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens that the router has sent to clients; None with a single view."""
        last, first = self._samples[-1], self._earlier(RATE_MS)
        spent_s = (last.at_ms - first.at_ms) / 1000
        return (last.num_output_tokens - first.num_output_tokens) / spent_s if spent_s > 0 else None

    def first_token_s(self, part: float) -> float | None:
        """The time to the first token that this part of the last minute's requests does not exceed."""
        return quantile(self._samples[-1].first_token, self._earlier(MINUTE_MS).first_token, part)

    def between_tokens_s(self, part: float) -> float | None:
        """The time between tokens that this part of the last minute's gaps does not exceed."""
        return quantile(self._samples[-1].between_tokens, self._earlier(MINUTE_MS).between_tokens, part)

    def steps_of(self, incarnation: str) -> StepPhases:
        """What the steps of a worker have spent and computed per second; zeros with a single view."""
        last, first = self._samples[-1], self._earlier(RATE_MS)
        spent_s = (last.at_ms - first.at_ms) / 1000
        now, before = last.steps.get(incarnation), first.steps.get(incarnation)
        if now is None or before is None or spent_s <= 0:
            return StepPhases(0.0, 0.0, 0.0, 0)
        plan_s, run_s, commit_s = ((now[i] - before[i]) / spent_s for i in range(3))
        return StepPhases(plan_s, run_s, commit_s, round((now.num_tokens - before.num_tokens) / spent_s))

    def _earlier(self, ms: int) -> CountSample:
        """The sample of so long ago, or the oldest one."""
        since = self._samples[-1].at_ms - ms - SLACK_MS
        return next(sample for sample in self._samples if sample.at_ms >= since)


def sample_of(view: admin_pb2.WatchClusterResponse) -> CountSample:
    return CountSample(
        at_ms=view.up_ms,
        num_output_tokens=sum(traffic.num_output_tokens for traffic in view.traffic),
        first_token=_sum([traffic.first_token for traffic in view.traffic]),
        between_tokens=_sum([traffic.between_tokens for traffic in view.traffic]),
        steps={
            worker.incarnation: StepPhases(
                worker.load.step_plan_s, worker.load.step_run_s, worker.load.step_commit_s, worker.load.num_step_tokens
            )
            for worker in view.workers
        },
    )


def _sum(histograms: Sequence[admin_pb2.TimeHistogram]) -> Counter[float]:
    total: Counter[float] = Counter()
    for histogram in histograms:
        total.update(dict(zip((*histogram.bounds_s, math.inf), histogram.counts, strict=False)))
    return total


def quantile(now: Counter[float], before: Counter[float], part: float) -> float | None:
    """The time that this part of what has come since does not exceed, by proportion within its bucket."""
    since = now.copy()
    since.subtract(before)
    wanted, below, low = part * since.total(), 0, 0.0
    if not wanted:
        return None
    for bound, count in sorted(since.items()):
        if count and below + count >= wanted:
            return low if bound == math.inf else low + (bound - low) * (wanted - below) / count
        below, low = below + count, bound
    return low
