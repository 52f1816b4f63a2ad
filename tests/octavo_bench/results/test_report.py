"""The names of the JSON stay, and the cautions say when its figures are not to be believed."""

from datetime import UTC, datetime

from scripted_endpoint import ScriptedEndpoint

from octavo_bench.endpoints.base import StreamPart, StreamTotals
from octavo_bench.measurement import RequestMeasurement, RoundMeasurement
from octavo_bench.results import report
from octavo_bench.results.summary import parse_objective

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


def make_round(number):
    """A round of a second: each request took 0.1 s to the first of its five events, and 10 ms for each other one."""
    requests = []
    for index in range(10):
        due = 10.0 + index * 0.01
        made = RequestMeasurement(index, due, 5, sent_at=due)
        for event in range(5):
            made.note_part(StreamPart(" a"), due + 0.1 + 0.01 * event)
        made.note_part(StreamPart(totals=StreamTotals(10, 5, 0)), due + 0.14)
        made.ended_at = due + 0.14
        requests.append(made)
    return RoundMeasurement(number, 10.0, 11.0, requests, 0.1, [0.0] * 9, False)


def result(*sides):
    options = {"interrupted": False, "started_at": datetime(2026, 1, 2, tzinfo=UTC)}
    return report.result_of([ScriptedEndpoint() for _ in sides], sides, SETTINGS, OBJECTIVE, **options)


def test_the_names_of_the_result_stay():
    found = result([make_round(0), make_round(1)])
    assert found.keys() == RESULT
    assert (found["version"], found["comparison"]) == (1, None)
    endpoint = found["endpoints"][0]
    assert endpoint.keys() == {"name", "url", "kind", "model", "total", "rounds"}
    total = endpoint["total"]
    assert total.keys() == SUMMARY
    assert [each.keys() for each in endpoint["rounds"]] == [SUMMARY | {"number", "cut"}] * 2
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        assert total[name].keys() == {"mean", "p50", "p90", "p95", "p99", "max"}
    assert total["goodput"].keys() == {"slo_ms", "requests", "requests_per_s", "share"}
    assert total["generator"].keys() == {"cpu_share", "lateness_ms", "loop_lag_ms"}
