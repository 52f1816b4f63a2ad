"""The SLO of `--slo`: what a request must keep to be counted as goodput."""

import math
from dataclasses import dataclass

from octavo.cli.bench.measurement import RequestMeasurement
from octavo.cli.bench.statistics import percentile

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
NAMES = ("ttft", "itl", "tpot", "e2e")
ITL_QUANTILE = 0.99  # this share of a request's gaps must keep the limit of itl
EXAMPLE = "ttft=500ms,itl=50ms"


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
