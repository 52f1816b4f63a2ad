"""Two endpoints take turns, round by round, and are sent the same lengths at the same times."""

import asyncio

import pytest
from scripted_endpoint import ScriptedEndpoint
from virtual_time import run_virtually

from octavo.cli.bench.distributions import ArrivalProcess, parse_lengths
from octavo.cli.bench.rounds import Benchmark, BenchSettings
from octavo.cli.bench.token_counter import TokenCounter
from octavo.cli.bench.traffic import SyntheticTraffic

TRAFFIC = SyntheticTraffic(3, parse_lengths("4-9"), parse_lengths("2-20"))


def run_benchmark(monkeypatch, endpoints, settings, *, stop_after_s=None, counter=None):
    ended = []

    async def main():
        stop = asyncio.Event()
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, stop.set)
        benchmark = Benchmark(endpoints, TRAFFIC, settings, counter, lambda side, request: ended.append(side))
        await benchmark.run(stop)
        return benchmark

    return run_virtually(main(), monkeypatch), ended


def pair():
    log = []
    return [ScriptedEndpoint("A", log=log), ScriptedEndpoint("B", log=log, delay_s=0.2)], log


def test_two_endpoints_take_turns_after_their_warm_up(monkeypatch):
    endpoints, log = pair()
    settings = BenchSettings(concurrency=2, num_conversations=3, rounds=4, warm_up=2)
    benchmark, ended = run_benchmark(monkeypatch, endpoints, settings)
    assert "".join(log) == "AABB" + "AAABBB" * 4
    assert ended == ([0] * 3 + [1] * 3) * 4  # the warm-up is not reported
    assert [[each.number for each in side] for side in benchmark.rounds] == [[0, 1, 2, 3]] * 2
    assert all(len(each.requests) == 3 for side in benchmark.rounds for each in side)


def test_both_get_the_same_lengths_at_the_same_times_and_other_words(monkeypatch):
    endpoints, _ = pair()
    settings = BenchSettings(arrivals=ArrivalProcess(2.0), num_conversations=10, rounds=3)
    benchmark, _ = run_benchmark(monkeypatch, endpoints, settings)
    first, second = (endpoint.requests for endpoint in endpoints)
    assert [request.max_tokens for request in first] == [request.max_tokens for request in second]
    assert [len(request.prompt.split()) for request in first] == [len(request.prompt.split()) for request in second]
    assert not {request.prompt for request in first} & {request.prompt for request in second}
    offsets = [
        [[request.intended_at - each.began_at for request in each.requests] for each in side]
        for side in benchmark.rounds
    ]
    assert offsets[0] == [pytest.approx(times) for times in offsets[1]]
    assert offsets[0][0] != pytest.approx(offsets[0][1])  # another round, other times


def test_a_stop_keeps_the_rounds_so_far(monkeypatch):
    endpoints, _ = pair()
    settings = BenchSettings(concurrency=3, num_conversations=30, rounds=100)
    benchmark, _ = run_benchmark(monkeypatch, endpoints, settings, stop_after_s=20.0)
    lengths = [len(side) for side in benchmark.rounds]
    assert 1 <= lengths[1] <= lengths[0] <= lengths[1] + 1
    cut = [each.cut for side in benchmark.rounds for each in side]
    assert sum(cut) == 1
    assert benchmark.rounds[(lengths[0] + lengths[1] + 1) % 2][-1].cut


def test_a_stop_in_the_warm_up_leaves_empty_rounds(monkeypatch):
    endpoints, log = pair()
    settings = BenchSettings(concurrency=3, num_conversations=30, rounds=2, warm_up=500)
    benchmark, _ = run_benchmark(monkeypatch, endpoints, settings, stop_after_s=1.0)
    assert benchmark.rounds == [[], []]
    assert set(log) == {"A"}


def test_a_tokenizer_counts_for_an_endpoint_that_does_not(monkeypatch):
    class Silent(ScriptedEndpoint):
        async def stream(self, request):
            async for part in super().stream(request):
                if part.text:
                    yield type(part)(part.text * 3)

    settings = BenchSettings(concurrency=1, num_conversations=2)
    counter = TokenCounter(str.split, 100)
    benchmark, _ = run_benchmark(monkeypatch, [Silent()], settings, counter=counter)
    for request in benchmark.rounds[0][0].requests:
        assert request.counted_by == "tokenizer"
        assert request.output_tokens == 3 * request.wanted_tokens
    benchmark, _ = run_benchmark(monkeypatch, [Silent()], settings)
    assert {request.counted_by for request in benchmark.rounds[0][0].requests} == {"events"}
