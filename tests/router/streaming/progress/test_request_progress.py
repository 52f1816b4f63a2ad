"""The log line at the end of a request: its ids, numbers and times, and never what it said or was answered."""

import asyncio
import io
import json
import logging
import time
from dataclasses import replace

import pytest
from accepted import accepted_sequence

from gpu_worker.testing.fake_runner import FakeRunner
from octavo.process import telemetry
from octavo.request.errors import InvalidArgument, RunnerFailed
from octavo.request.record import first_record
from octavo.request.sampling import SamplingParams
from router.streaming.progress.request_progress import RequestProgress
from router.streaming.progress.request_tally import RequestTally

CANARY = "xyzzy-plugh-9081726354"
PROMPT = list(range(3, 40))
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


class Broken(FakeRunner):
    """Fails in every step, with an error that says what it was about."""

    def run(self, step):
        raise ValueError(f"cannot run {CANARY}")


@pytest.fixture
def logged():
    """Has all loggers of the process, those of libraries included, write every line of a level and a form here."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    stream = io.StringIO()

    def begin(form: str = "json", lowest: str = "info") -> io.StringIO:
        telemetry.configure("test", form=form, level=lowest, stream=stream)
        return stream

    yield begin
    root.handlers[:] = before
    root.setLevel(level)


def ends(stream: io.StringIO) -> list[dict]:
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line for line in lines if "end" in line]


async def test_a_request_has_one_line_at_its_end(world, logged):
    stream = logged()
    await world.start()
    client = world.client()
    await client.complete(PROMPT, GREEDY, request_id="first")
    again = await client.complete(PROMPT, GREEDY, request_id="second")
    first, second = ends(stream)
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
    stream, tally = logged(), RequestTally()
    progress = RequestProgress(first_record(accepted_sequence()), "m", tally, arrived_at=time.monotonic())
    progress.note_tokens(1)
    assert progress.waiting_since is None
    if owner_is_known:
        progress.note_owner(1, moved=False)
    progress.note_end("length")
    (line,) = ends(stream)
    assert 0 <= line["queued_ms"] <= line["first_token_ms"]
    assert sum(tally.of_model("m").queued.counts) == 1


@pytest.mark.parametrize("form", telemetry.FORMATS)
async def test_logs_have_no_prompts_and_no_outputs(world, logged, form):
    """Whatever happens to it: it is served, refused, cancelled, taken over, or fails in a step."""
    stream = logged(form, "debug")
    await world.start(workers=2, step_s=0.01)
    client, outputs = world.client(), []
    for text in (CANARY, f"tell me of {CANARY}"):
        outputs.append((await client.complete(text, GREEDY)).text)
    with pytest.raises(InvalidArgument):
        await client.complete(CANARY, replace(GREEDY, stop=(CANARY * 1000,)))
    with pytest.raises(InvalidArgument):
        await client.complete(CANARY * 100_000, GREEDY)
    running = asyncio.create_task(client.complete(f"{CANARY} {CANARY}", replace(GREEDY, max_tokens=100)))
    await world.until(lambda: any(e.record.owner and not e.record.state.ended for e in world.entries))
    await world.kill(world.workers[0])
    outputs.append((await running).text)
    leaving = client.generate(CANARY, replace(GREEDY, max_tokens=200), request_id="cancelled")
    outputs.append((await anext(leaving)).text)
    await client.cancel("cancelled")
    await leaving.aclose()
    world.workers[0].engine._runner = Broken()
    with pytest.raises(RunnerFailed):
        await client.complete(f"once more {CANARY}", GREEDY)
    text = stream.getvalue()
    assert "request has ended" in text
    assert "failed" in text
    assert CANARY not in text
    assert CANARY[:12] not in text
    assert not [
        output for output in outputs if len(output) > 5 and (output in text or json.dumps(output)[1:-1] in text)
    ]
