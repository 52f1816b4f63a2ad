"""The names of the JSON stay, and the cautions say when its figures are not to be believed."""

from datetime import UTC, datetime

from scripted_endpoint import ScriptedEndpoint

from octavo_bench.endpoints.base import StreamPart, StreamTotals
from octavo_bench.measurement import RequestMeasurement, RoundMeasurement
from octavo_bench.results import report
from octavo_bench.results.summary import parse_objective

SPREAD = {"mean", "p50", "p90", "p95", "p99", "max"}
SUMMARY = {
    "requests", "completed", "failed", "interrupted", "failures", "seconds", "requests_per_s", "output_tokens",
    "output_tokens_per_s", "prompt_tokens", "total_tokens_per_s", "cached_tokens", "mean_prompt_tokens",
    "mean_output_tokens", "short_answers", "mean_in_flight", "ttft_ms", "itl_ms", "tpot_ms", "e2e_ms",
    "tokens_per_event", "counted_by", "goodput", "generator",
}  # fmt: skip
RESULT = {
    "version", "octavo", "started_at", "interrupted", "machine", "settings", "endpoints", "comparison", "cautions",
}  # fmt: skip
SETTINGS = {
    "rate": None, "burstiness": None, "concurrency": 4, "requests": 10, "duration_s": None, "rounds": 3, "seed": 0,
    "tokenizer": None, "token_ids": False, "wanted_prompt_tokens": 10,
}  # fmt: skip
OBJECTIVE = parse_objective("ttft=500ms")


def make_round(number, speed=1.0, *, num_requests=10, cut=False, tokens_per_event=1, cpu_s=0.1, late_s=0.0, lag_s=0.0):
    """A round of a second: each request took 0.1 s to the first of its five events, and 10 ms for each other one."""
    requests = []
    for index in range(num_requests):
        due = 10.0 + index * 0.01
        made = RequestMeasurement(index, due, 5 * tokens_per_event, sent_at=due + late_s)
        for event in range(5):
            made.note_part(StreamPart(" a"), due + late_s + (0.1 + 0.01 * event) / speed)
        made.note_part(StreamPart(totals=StreamTotals(10, 5 * tokens_per_event, 0)), due + late_s + 0.14 / speed)
        made.ended_at = due + late_s + 0.14 / speed
        requests.append(made)
    return RoundMeasurement(number, 10.0, 10.0 + 1.0 / speed, requests, cpu_s, [lag_s] * 9, cut)


def result(*sides, settings=SETTINGS, **more):
    endpoints = [ScriptedEndpoint() for _ in sides]
    started_at = datetime(2026, 1, 2, tzinfo=UTC)
    return report.result_of(endpoints, sides, settings, OBJECTIVE, interrupted=False, started_at=started_at, **more)


def test_the_names_of_the_result_stay():
    found = result([make_round(0), make_round(1)])
    assert found.keys() == RESULT
    assert found["version"] == 1
    endpoint = found["endpoints"][0]
    assert endpoint.keys() == {"name", "url", "kind", "model", "total", "rounds"}
    assert endpoint["total"].keys() == SUMMARY
    assert [each.keys() for each in endpoint["rounds"]] == [SUMMARY | {"number", "cut"}] * 2
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        assert endpoint["total"][name].keys() == SPREAD
    assert endpoint["total"]["goodput"].keys() == {"slo_ms", "requests", "requests_per_s", "share"}
    assert endpoint["total"]["generator"].keys() == {"cpu_share", "lateness_ms", "loop_lag_ms"}
    assert found["comparison"] is None
