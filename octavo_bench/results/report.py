"""The result of a run: one JSON object, whose names stay, and the same as a table for people."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from octavo.cli import output
from octavo_bench.endpoints.base import BenchEndpoint
from octavo_bench.measurement import RoundMeasurement
from octavo_bench.results import cautions
from octavo_bench.results.summary import ServiceObjective, compare, summarize, value_at
from octavo_bench.rounds import SIDES

VERSION = 1  # of the JSON: one more when a name changes its meaning or goes
SPREADS = (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("TPOT", "tpot_ms"), ("e2e", "e2e_ms"))
SHOWN = ("mean", "p50", "p90", "p99")
RATES = (
    ("requests/s", ("requests_per_s",)),
    ("output tokens/s", ("output_tokens_per_s",)),
    ("total tokens/s", ("total_tokens_per_s",)),
    ("goodput, requests/s", ("goodput", "requests_per_s")),
    ("goodput, share", ("goodput", "share")),
    ("requests in flight", ("mean_in_flight",)),
    ("prompt tokens, mean", ("mean_prompt_tokens",)),
    ("output tokens, mean", ("mean_output_tokens",)),
    ("tokens per event", ("tokens_per_event",)),
    ("generator, share of a core", ("generator", "cpu_share")),
)


def result_of(
    endpoints: Sequence[BenchEndpoint],
    rounds: Sequence[Sequence[RoundMeasurement]],
    settings: dict[str, Any],
    objective: ServiceObjective | None,
    *,
    interrupted: bool,
    started_at: datetime,
) -> dict[str, Any]:
    """The object of `--json`."""
    totals = [summarize(measured, objective) for measured in rounds]
    told: list[str] = []
    for name, total, measured in zip(SIDES, totals, rounds, strict=False):
        told += cautions.of_endpoint(name, total, measured, settings["rate"] is not None)
        if settings["wanted_prompt_tokens"]:
            told += cautions.of_prompts(
                name, total, settings["wanted_prompt_tokens"], bool(settings["tokenizer"] or settings["token_ids"])
            )
    comparison = None
    if len(endpoints) > 1:
        comparison = compare(rounds, objective, settings["seed"])
        told += cautions.of_pair(totals, min(map(len, rounds)))
    return {
        "version": VERSION,
        "octavo": _octavo_version(),
        "started_at": started_at.astimezone(UTC).isoformat(timespec="seconds"),
        "interrupted": interrupted,
        "machine": {"cores": os.cpu_count(), "load_average": [round(load, 2) for load in os.getloadavg()]},
        "settings": settings,
        "endpoints": [
            {
                "name": name,
                "url": endpoint.url,
                "kind": endpoint.kind,
                "model": endpoint.model,
                "total": total,
                "rounds": [
                    {"number": each.number, "cut": each.cut, **summarize([each], objective)} for each in measured
                ],
            }
            for name, endpoint, total, measured in zip(SIDES, endpoints, totals, rounds, strict=False)
        ],
        "comparison": comparison,
        "cautions": told,
    }


def rendered(result: dict[str, Any]) -> str:
    """The table for people, with what they have to know below it."""
    endpoints = result["endpoints"]
    lines = [
        f"{endpoint['name']}: {endpoint['url']} ({endpoint['kind']}, {endpoint['model']})" for endpoint in endpoints
    ]
    lines += [_load_line(result["settings"]), ""]
    header = ["", *(endpoint["name"] for endpoint in endpoints)]
    if result["comparison"] is not None:
        header += ["A/B", "95 % interval", "rounds from", "to"]
    rows = [[*row, *[""] * (len(header) - len(row))] for row in _rows(result)]
    lines.append(output.table(*_right_aligned(header, rows)))
    for endpoint in endpoints:
        for reason, failure in endpoint["total"]["failures"].items():
            lines.append(f"{endpoint['name']}: {failure['count']} failed: {reason}: {failure['example']}")
    lines += [f"caution: {text}" for text in result["cautions"]]
    if result["interrupted"]:
        lines.append("interrupted: these are the results so far")
    return "\n".join(lines)


def _rows(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table, without the empty cells at their ends."""
    totals = [endpoint["total"] for endpoint in result["endpoints"]]
    rows = [["completed + failed", *(f"{total['completed']} + {total['failed']}" for total in totals)]]
    if result["interrupted"]:
        rows.append(["cut by Ctrl-C", *(str(total["interrupted"]) for total in totals)])
    listed = list(RATES)
    listed[5:5] = [(f"{name} {shown}, ms", (path, shown)) for name, path in SPREADS for shown in SHOWN]
    for name, path in listed:
        values = [value_at(total, path) for total in totals]
        if any(value is not None for value in values):
            rows.append([name, *map(_number, values), *_ratio_cells(result["comparison"], ".".join(path))])
    return rows


def _right_aligned(header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """The same table, where all columns but the first are aligned to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) if column else 0 for column in range(len(header))]
    aligned = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in [header, *rows]]
    return aligned[0], aligned[1:]


def _ratio_cells(comparison: dict[str, Any] | None, name: str) -> list[str]:
    if comparison is None:
        return []
    found = comparison.get(name)
    if found is None:
        return []
    interval = f"{found['low']:.3f} to {found['high']:.3f}" if found["low"] is not None else "-"
    return [f"{found['ratio']:.3f}", interval, f"{found['smallest']:.3f}", f"{found['largest']:.3f}"]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


def _load_line(settings: dict[str, Any]) -> str:
    if settings["rate"] is None:
        load = f"closed loop, {settings['concurrency']} at once"
    else:
        load = f"open loop, {settings['rate']:g} per second, burstiness {settings['burstiness']:g}"
    limit = f"{settings['requests']} requests" if settings["requests"] else f"{settings['duration_s']:g} s"
    return f"{load}; {settings['rounds']} round(s) of {limit}; seed {settings['seed']}"


def _octavo_version() -> str:
    try:
        return metadata.version("octavo")
    except metadata.PackageNotFoundError:
        return "unknown"
