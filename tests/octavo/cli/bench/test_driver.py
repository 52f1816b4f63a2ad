"""A round sends what it should when it should, and its latencies count from the moment at which a request was due."""

import asyncio
from itertools import count

import pytest
from scripted_endpoint import ScriptedEndpoint
from virtual_time import run_virtually

from octavo.cli.bench.endpoint_base import StreamPart, StreamTotals
from octavo.cli.bench.measurement import INTERRUPTED
from octavo.cli.bench.rounds import FAILURE_PAUSE_S, RoundDriver, RoundOptions
from octavo.cli.bench.summary import summarize
from octavo.cli.bench.traffic import Conversation, ConversationTurn

NUM_TOKENS = 11  # 0.1 s to the first one, and 0.1 s for the others


def conversations(turns=1, pause_s=0.0):
    return (
        Conversation(number, [ConversationTurn(f" ask {number}.{turn}", NUM_TOKENS, pause_s) for turn in range(turns)])
        for number in count()
    )


def run_round(monkeypatch, endpoint, options, *, made=None, timeout_s=60.0, stop_after_s=None):
    async def main():
        stop = asyncio.Event()
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, stop.set)
        driver = RoundDriver(endpoint, timeout_s)
        return await driver.run_round(0, made or conversations(), options, stop)

    return run_virtually(main(), monkeypatch)


def test_a_closed_loop_keeps_its_users_busy(monkeypatch):
    endpoint = ScriptedEndpoint()
    measured = run_round(monkeypatch, endpoint, RoundOptions(num_users=4, num_conversations=12))
    assert len(measured.requests) == 12
    assert endpoint.most_at_once == 4
    assert measured.seconds == pytest.approx(3 * 0.2)
    for request in measured.requests:
        assert request.completed
        assert request.ttft_s == pytest.approx(0.1)
        assert request.e2e_s == pytest.approx(0.2)
        assert request.event_gaps == pytest.approx([0.01] * 10)
        assert request.tpot_s == pytest.approx(0.01)
        assert (request.output_tokens, request.counted_by) == (NUM_TOKENS, "usage")


def test_a_closed_loop_of_some_seconds_begins_nothing_after_them(monkeypatch):
    measured = run_round(monkeypatch, ScriptedEndpoint(), RoundOptions(num_users=3, seconds=0.95))
    assert len(measured.requests) == 15
    assert all(request.completed for request in measured.requests)
    assert max(request.sent_at for request in measured.requests) < measured.began_at + 0.95


def test_an_open_loop_does_not_wait_for_answers(monkeypatch):
    endpoint = ScriptedEndpoint(delay_s=10.0)
    offsets = [0.0, 0.5, 0.5, 2.0]
    measured = run_round(monkeypatch, endpoint, RoundOptions(offsets=iter(offsets), num_conversations=4))
    sent = [request.sent_at - measured.began_at for request in measured.requests]
    assert sent == pytest.approx(offsets, abs=0.002)
    assert endpoint.most_at_once == 4


def test_an_open_loop_of_some_seconds_sends_what_arrives_in_them(monkeypatch):
    offsets = (0.25 * number for number in count())
    measured = run_round(monkeypatch, ScriptedEndpoint(), RoundOptions(offsets=offsets, seconds=1.0))
    assert len(measured.requests) == 4


def test_a_stall_of_the_server_counts_for_all_that_would_have_come(monkeypatch):
    """No coordinated omission: 10 requests per second arrive during a stall of 10 s, and all of them have waited."""
    endpoint = ScriptedEndpoint(stalls=(1010.0, 1020.0))
    offsets = (0.1 * number for number in count())
    measured = run_round(monkeypatch, endpoint, RoundOptions(offsets=offsets, seconds=40.0))
    assert len(measured.requests) == 400
    found = summarize([measured], None)
    assert found["ttft_ms"]["p50"] == pytest.approx(100, abs=2)
    assert found["ttft_ms"]["p90"] == pytest.approx(6000, rel=0.05)  # a quarter waited, evenly up to 10 s
    assert found["ttft_ms"]["max"] == pytest.approx(10_000, rel=0.02)


def test_a_generator_that_stalls_says_so_and_counts_it(monkeypatch):
    """Requests that the generator itself sends late have waited since they were due."""

    async def main():
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        loop.call_later(0.55, loop.spend, 3.0)  # the program computes for 3 s
        offsets = (0.1 * number for number in range(10))
        driver = RoundDriver(ScriptedEndpoint(), 60.0)
        return await driver.run_round(0, conversations(), RoundOptions(offsets=offsets), stop)

    measured = run_virtually(main(), monkeypatch)
    late = [request for request in measured.requests if request.lateness_s > 1.0]
    assert len(late) == 4
    assert max(request.lateness_s for request in late) == pytest.approx(2.95, abs=0.01)
    assert all(request.ttft_s == pytest.approx(request.lateness_s + 0.1, abs=0.01) for request in late)
    assert max(measured.loop_lags) > 2.9


def test_turns_follow_their_answers(monkeypatch):
    endpoint = ScriptedEndpoint()
    made = conversations(turns=3, pause_s=5.0)
    measured = run_round(monkeypatch, endpoint, RoundOptions(num_users=1, num_conversations=1), made=made)
    answer = " a" * NUM_TOKENS
    assert [request.prompt for request in endpoint.requests] == [
        " ask 0.0",
        f" ask 0.0{answer} ask 0.1",
        f" ask 0.0{answer} ask 0.1{answer} ask 0.2",
    ]
    assert measured.seconds == pytest.approx(3 * 0.2 + 2 * 5.0, abs=0.01)
    assert all(request.ttft_s == pytest.approx(0.1, abs=0.01) for request in measured.requests)


def test_failures_are_counted_by_reason_and_do_not_end_the_round(monkeypatch):
    endpoint = ScriptedEndpoint(fails=lambda number: {1: "HTTP 429", 3: "HTTP 429", 4: "stream cut"}.get(number, ""))
    measured = run_round(monkeypatch, endpoint, RoundOptions(num_users=2, num_conversations=10))
    found = summarize([measured], None)
    assert (found["requests"], found["completed"], found["failed"]) == (10, 7, 3)
    assert found["failures"] == {
        "HTTP 429": {"count": 2, "example": "request 1"},
        "stream cut": {"count": 1, "example": "request 4"},
    }
    assert found["output_tokens"] == 7 * NUM_TOKENS


def test_a_server_that_refuses_all_is_not_called_in_a_hot_loop(monkeypatch):
    endpoint = ScriptedEndpoint(delay_s=0.0, fails=lambda _: "not connected")
    measured = run_round(monkeypatch, endpoint, RoundOptions(num_users=2, seconds=10.0))
    assert len(measured.requests) == pytest.approx(2 * 10 / FAILURE_PAUSE_S, abs=4)


def test_a_request_that_never_ends_fails_by_its_time_limit(monkeypatch):
    measured = run_round(
        monkeypatch, ScriptedEndpoint(delay_s=1e6), RoundOptions(num_users=1, num_conversations=1), timeout_s=30.0
    )
    request = measured.requests[0]
    assert request.reason == "timeout"
    assert "--request-timeout" in request.message
    assert request.e2e_s == pytest.approx(30.0)


@pytest.mark.parametrize("open_loop", [False, True])
def test_a_stop_cuts_what_is_under_way_and_leaves_no_task(monkeypatch, open_loop):
    endpoint = ScriptedEndpoint(delay_s=0.1, gap_s=1.0)
    offsets = (0.5 * number for number in count()) if open_loop else None
    options = RoundOptions(num_users=4, offsets=offsets)
    measured = run_round(monkeypatch, endpoint, options, stop_after_s=12.25)
    assert measured.cut
    assert endpoint.at_once == 0  # every stream was closed
    cut = [request for request in measured.requests if request.reason == INTERRUPTED]
    assert len(cut) == (20 if open_loop else 4)
    assert all(request.ended_at == pytest.approx(measured.began_at + 12.25, abs=0.01) for request in cut)
    found = summarize([measured], None)
    assert found["interrupted"] == len(cut)
    assert found["failed"] == 0
    assert found["completed"] == len(measured.requests) - len(cut) > 0
    assert found["output_tokens"] > found["completed"] * NUM_TOKENS  # those that came before the cut count


@pytest.mark.parametrize(("num_tokens", "reason"), [(3, ""), (0, "no output")])
def test_tokens_without_a_text_are_an_answer(monkeypatch, num_tokens, reason):
    """Tokens that are parts of characters may never become text: by HTTP, usage alone tells of them."""

    class Mute(ScriptedEndpoint):
        async def stream(self, request):
            await asyncio.sleep(0.1)
            yield StreamPart(totals=StreamTotals(7, num_tokens))

    measured = run_round(monkeypatch, Mute(), RoundOptions(num_users=1, num_conversations=1))
    assert measured.requests[0].reason == reason
    found = summarize([measured], None)
    assert (found["output_tokens"], found["ttft_ms"], found["itl_ms"]) == (num_tokens, None, None)
