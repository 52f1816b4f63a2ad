"""Medians of calls that take turns."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping

import torch
from target import Target

Call = Callable[[int], object]  # with the number of the inputs to use
Case = tuple[str, float, Call, Call | None]  # op, bytes read and written, ours, torch's
COLD_BYTES = 256 << 20  # of inputs in all, so that none is found in a cache


def sets(num_bytes: int) -> int:
    """How many inputs of this size are more than any cache holds."""
    return 1 if num_bytes > 4 * COLD_BYTES else max(2, min(64, -(-COLD_BYTES // max(num_bytes, 1))))


def medians(
    t: Target, calls: Mapping[str, Call], num_sets: int, repeats: int = 15, captured: bool = True
) -> dict[str, float]:
    """Seconds of one call of each, over all sets of inputs in turn; the calls take turns, too.

    On a device each goes through its inputs as one graph, so that launches from Python are not what is measured; where
    one call takes long, or cannot be captured, without.
    """
    runs = {name: prepared(t, call, num_sets, captured) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(t.pick(repeats, 2)):
        for name, run in runs.items():
            times[name].append(clocked(t, run) / num_sets)
    return {name: statistics.median(values) for name, values in times.items()}


def prepared(t: Target, call: Call, num_sets: int, captured: bool) -> Callable[[], object]:
    def through() -> None:
        for number in range(num_sets):
            call(number)

    through()
    t.wait()
    if t.rehearsal or not captured:
        return through
    stream = torch.cuda.Stream(t.device)
    with torch.cuda.stream(stream):
        through()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        through()
    graph.replay()
    t.wait()
    return graph.replay


def clocked(t: Target, run: Callable[[], object]) -> float:
    if t.rehearsal:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def ratio(times: Mapping[str, float], ours: str, theirs: str) -> str:
    """How many times as fast; empty where there is no such peer."""
    return f"{times[theirs] / times[ours]:.2f}×" if theirs in times else ""


def report(t: Target, title: str, copy: float, groups: Iterable[tuple[int, list[Case]]]) -> None:
    """A table of ops beside copying, at `copy` bytes per second, and torch. `groups`: how many sets of inputs some ops
    go through, and the ops."""
    lines = []
    for num_sets, cases in groups:
        for op, num_bytes, call, peer in cases:
            times = medians(t, {"ours": call} | ({"torch": peer} if peer else {}), num_sets)
            rate = num_bytes / times["ours"]
            speed = f"{times['ours'] * 1e6:.1f}", f"{rate / 1e9:.0f}", f"{rate / copy:.0%}"
            lines.append((op, *speed, ratio(times, "ours", "torch")))
    t.table(title, ("op", "µs", "GB/s", "of copy", "torch"), lines)
