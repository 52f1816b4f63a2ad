"""The names of the JSON stay, and the cautions say when its figures are not to be believed."""

from datetime import UTC, datetime

import pytest
from scripted_endpoint import ScriptedEndpoint

from octavo.cli.bench import cautions, report
from octavo.cli.bench.endpoint_base import StreamPart, StreamTotals
from octavo.cli.bench.measurement import RequestMeasurement, RoundMeasurement
from octavo.cli.bench.summary import parse_objective, summarize

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


def test_the_figures_are_those_of_the_requests():
    total = summarize([make_round(0), make_round(1)], OBJECTIVE)
    assert (total["requests"], total["completed"], total["seconds"]) == (20, 20, 2.0)
    assert (total["requests_per_s"], total["output_tokens_per_s"], total["total_tokens_per_s"]) == (10.0, 50.0, 150.0)
    assert total["ttft_ms"]["p99"] == pytest.approx(100)
    assert total["itl_ms"]["mean"] == pytest.approx(10)
    assert total["tpot_ms"]["max"] == pytest.approx(10)
    assert total["e2e_ms"]["p50"] == pytest.approx(140)
    assert total["mean_in_flight"] == pytest.approx(20 * 0.14 / 2)
    assert total["goodput"]["share"] == 1.0
    assert total["counted_by"] == {"usage": 20}


def test_several_tokens_in_an_event_are_told():
    """ITL stays the time between events, which a reader waits; TPOT has the time per token."""
    found = result([make_round(0, tokens_per_event=4)])
    total = found["endpoints"][0]["total"]
    assert total["tokens_per_event"] == 4.0
    assert total["itl_ms"]["p50"] == pytest.approx(10)
    assert total["tpot_ms"]["p50"] == pytest.approx(40 / 19, abs=1e-3)
    assert any("an event has 4.00 tokens" in text for text in found["cautions"])


def test_the_ratio_counts_only_rounds_that_both_have_finished():
    first = [make_round(0, 2.0), make_round(1, 2.0), make_round(2, 9.0, cut=True)]
    second = [make_round(0), make_round(1), make_round(2)]
    found = result(first, second)["comparison"]
    rate = found["output_tokens_per_s"]
    assert rate.keys() == {"ratio", "low", "high", "smallest", "largest", "num_rounds", "better"}
    assert (rate["ratio"], rate["low"], rate["high"], rate["num_rounds"]) == (2.0, 2.0, 2.0, 2)
    assert found["ttft_ms.p50"]["ratio"] == pytest.approx(0.5)
    assert (rate["better"], found["ttft_ms.p50"]["better"]) == ("higher", "lower")


def test_the_table_shows_both_sides_and_the_ratio():
    text = report.rendered(result([make_round(0, 2.0), make_round(1, 4.0)], [make_round(0), make_round(1)]))
    line = next(line for line in text.splitlines() if line.startswith("output tokens/s"))
    assert line.split()[2:] == ["133.3", "50.0", "2.828", "2.000", "to", "4.000", "2.000", "4.000"]
    assert "TTFT p99, ms" in text


def test_no_round_at_all_is_a_result_too():
    found = result([], [])
    assert found["endpoints"][0]["total"]["requests"] == 0
    assert found["comparison"] == {}
    assert report.rendered({**found, "interrupted": True}).endswith("interrupted: these are the results so far")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"cpu_s": 0.95}, "the generator used 95% of a core"),
        ({"late_s": 0.03}, "the generator sent requests late"),
        ({"lag_s": 0.02}, "event loop was late"),
    ],
)
def test_a_generator_that_was_the_bottleneck_says_so(more, says):
    assert any(says in text for text in result([make_round(0, **more)])["cautions"])
    assert result([make_round(0)])["cautions"] == []


def test_prompts_of_another_length_are_told():
    found = result([make_round(0)], settings={**SETTINGS, "wanted_prompt_tokens": 5})
    assert found["cautions"] == ["A: prompts have 10 tokens on average, not 5; --tokenizer makes them exact"]
    assert result([make_round(0)], settings={**SETTINGS, "wanted_prompt_tokens": 7})["cautions"] == []


def test_an_endpoint_that_falls_behind_the_rate_is_told():
    """Arrivals took 0.09 s, and the answers to them a second."""
    found = result([make_round(0)], settings={**SETTINGS, "rate": 100.0, "burstiness": 1.0})
    assert any("did not keep up" in text for text in found["cautions"])


def test_a_comparison_of_unlike_things_is_told():
    few = list(cautions.of_pair([summarize([make_round(0)], None)] * 2, 2))
    assert few == ["2 round(s) of both endpoints say little about the spread: --rounds 5 or more"]
    unlike = [summarize([make_round(0, tokens_per_event=number)], None) for number in (1, 2)]
    text = " ".join(cautions.of_pair(unlike, 9))
    assert "compare TPOT" in text
    assert "answers of A and B have different lengths (5.0 and 10.0" in text
