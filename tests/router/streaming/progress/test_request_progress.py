"""The log line at the end of a request: its ids, numbers and times."""

import io
import json
import logging
import time

import pytest
from accepted import accepted_sequence

from octavo.process import telemetry
from octavo.request.record import first_record
from octavo.request.sampling import SamplingParams
from router.streaming.progress.request_progress import RequestProgress
from router.streaming.progress.request_tally import RequestTally

PROMPT = list(range(3, 40))
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture
def logged():
    """What all loggers of the process write, those of libraries included."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    telemetry.configure("test", form="json", level="info", stream=(stream := io.StringIO()))
    yield stream
    root.handlers[:] = before
    root.setLevel(level)


def ends(logged):
    return [line for line in map(json.loads, logged.getvalue().splitlines()) if "end" in line]


async def test_a_request_has_one_line_at_its_end(world, logged):
    await world.start()
    client = world.client()
    await client.complete(PROMPT, GREEDY, request_id="first")
    again = await client.complete(PROMPT, GREEDY, request_id="second")
    first, second = ends(logged)
    assert first["level"] == "info"
    assert first["message"] == "request has ended"
    assert (first["request"], first["seq"]) == ("first", world.entry("first").record.seq_id)
    assert (first["model"], first["class"], first["end"]) == ("fake", "default", "length")
    assert (first["prompt_tokens"], first["cached_tokens"], first["output_tokens"]) == (len(PROMPT), 0, 40)
    assert second["cached_tokens"] == again.usage.cached_tokens > 0
    assert 0 <= first["queued_ms"] <= first["first_token_ms"] <= first["total_ms"]
    assert (first["worker"], first["moves"], first["retries"], first["attached"]) == ("worker-0", 0, 0, 0)


@pytest.mark.parametrize("owner_is_known", [True, False])
def test_a_request_with_a_token_waits_no_more(logged, owner_is_known):
    """The token may be here before the worker's answer that it has the sequence, and so may the end."""
    tally = RequestTally()
    progress = RequestProgress(first_record(accepted_sequence()), "m", tally, arrived_at=time.monotonic())
    progress.note_tokens(1)
    assert progress.waiting_since is None
    if owner_is_known:
        progress.note_owner(1, moved=False)
    progress.note_end("length")
    (line,) = ends(logged)
    assert 0 <= line["queued_ms"] <= line["first_token_ms"]
    assert sum(tally.of_model("m").queued.counts) == 1
