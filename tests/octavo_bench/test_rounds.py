"""A round sends what it should when it should, and its latencies count from the moment at which a request was due."""

import asyncio
from itertools import count

import pytest
from scripted_endpoint import ScriptedEndpoint
from virtual_time import run_virtually

from octavo_bench.results.summary import summarize
from octavo_bench.rounds import RoundDriver, RoundOptions
from octavo_bench.traffic import Conversation, ConversationTurn

NUM_TOKENS = 11  # 0.1 s to the first one, and 0.1 s for the others


def run_round(monkeypatch, endpoint, options):
    async def main():
        turns = (Conversation(i, [ConversationTurn(f" ask {i}", NUM_TOKENS, 0.0)]) for i in count())
        return await RoundDriver(endpoint, 60.0).run_round(0, turns, options, asyncio.Event())

    return run_virtually(main(), monkeypatch)


def test_an_open_loop_does_not_wait_for_answers(monkeypatch):
    endpoint = ScriptedEndpoint(delay_s=10.0)
    offsets = [0.0, 0.5, 0.5, 2.0]
    measured = run_round(monkeypatch, endpoint, RoundOptions(offsets=iter(offsets), num_conversations=4))
    sent = [request.sent_at - measured.began_at for request in measured.requests]
    assert sent == pytest.approx(offsets, abs=0.002)
    assert endpoint.most_at_once == 4


def test_a_stall_counts_for_all_that_were_due(monkeypatch):
    """No coordinated omission: 10 requests per second arrive during a stall of 10 s, and all of them have waited."""
    endpoint = ScriptedEndpoint(stalls=(1010.0, 1020.0))
    offsets = (0.1 * number for number in count())
    measured = run_round(monkeypatch, endpoint, RoundOptions(offsets=offsets, seconds=40.0))
    assert len(measured.requests) == 400
    found = summarize([measured], None)
    assert found["ttft_ms"]["p50"] == pytest.approx(100, abs=2)
    assert found["ttft_ms"]["p90"] == pytest.approx(6000, rel=0.05)  # a quarter waited, evenly up to 10 s
    assert found["ttft_ms"]["max"] == pytest.approx(10_000, rel=0.02)
