"""Every example does all of its parts, whatever language it is in, and says what a run without trouble says."""

import asyncio

import grpc
import pytest
from breaking_router import BreakingRouter
from live.process import wait_until
from refusing_router import refusing

from octavo.client import SamplingParams
from octavo.store import open_store
from octavo.v1 import inference_pb2

pytestmark = pytest.mark.timeout(900)  # the first test of a language installs and builds

QUIET = ("health", "stream", "complete", "cancel", "deadline", "errors")


def expected(oracle, prompt, num_tokens):
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return oracle.outputs(list(prompt.encode()), params)[0]


def models(cluster):
    return cluster.inference().ListModels(inference_pb2.ListModelsRequest(), timeout=10).models


def test_each_part(example, cluster, oracle):
    code, parts = example.run(cluster.endpoints, *QUIET)
    assert [(part.name, part.verdict) for part in parts] == [(name, "ok") for name in QUIET]
    assert code == 0
    health, stream, complete, cancel, deadline, errors = parts
    assert health.values == {"status": "SERVING"}
    assert stream.values == {"tokens": "24", "finish": "LENGTH"}
    assert stream.printed.decode() == expected(oracle, "Once upon a time", 24).text + "\n"
    prompt = "Il était une fois"
    assert complete.values == {"prompt_tokens": str(len(prompt.encode())), "tokens": "24", "finish": "LENGTH"}
    assert complete.printed.decode() == expected(oracle, prompt, 24).text + "\n"
    assert cancel.values["finish"] == "CANCELLED"
    assert 0 < int(cancel.values["tokens"]) < 1000
    assert deadline.values["finish"] == "DEADLINE"
    assert 0 < int(deadline.values["tokens"]) < 1000
    assert errors.values["code"] == errors.values["reason"] == "INVALID_ARGUMENT"
    assert errors.values["fields"].split(",") == ["sampling.temperature", "sampling.top_p"]


async def lose_key(cluster):
    """The store loses the key of resume tokens, and nothing else."""
    store = open_store(cluster.store.url)
    await store.open()
    assert await store.server.client.delete("octavo:secret:resume")
    await store.close()


@pytest.mark.parametrize("end", ["kill", "stop", "kill, and the key is lost"])
def test_a_stream_outlives_its_router(example, cluster, oracle, end):
    """No token is lost and none is double: the text is that of a run in which nothing dies.

    If the only router dies that still had the key of the token, the other one has a new key. It refuses the token, and
    the stream goes on by id and index.
    """
    if is_lost := "key" in end:
        asyncio.run(lose_key(cluster))
        cluster.kill("r1")
        cluster.revive()

    def end_router(endpoint):
        name = "r0" if is_lost else f"r{cluster.endpoints.index(endpoint)}"
        cluster.kill(name) if end != "stop" else cluster.processes[name].stop()

    code, parts = example.run(cluster.endpoints, "attach", when_reading=end_router)
    assert [part.verdict for part in parts] == ["reading", "ok"]
    assert code == 0
    reading, attach = parts
    assert is_lost or reading.values == {"from": cluster.endpoints[0]}
    assert int(attach.values["attached"]) >= 1 + is_lost
    assert (attach.values["tokens"], attach.values["finish"]) == ("1000", "LENGTH")
    assert attach.printed.decode() == expected(oracle, "The story of a router:", 1000).text + "\n"


@pytest.mark.parametrize("ending", ["status", "silence", "break", "stutter"])
def test_an_answer_is_whole_with_its_terminal_event(example, ending):
    """What comes of the call after that event, and whether anything comes, does not matter. What counts against a
    stream that stutters is how often it has broken since its last event."""
    router, other = BreakingRouter(ending), BreakingRouter("status")
    with router.serving() as one, other.serving() as two:
        code, [part] = example.run([one] if ending == "stutter" else [one, two], "stream")
    assert (code, part.verdict, part.values) == (0, "ok", {"tokens": "24", "finish": "LENGTH"})
    assert part.printed == b"a" * 24 + b"\n" or ending == "stutter"
    if ending != "break":  # a broken connection may take the event with it
        assert router.calls == ["Generate"] + ["Attach"] * 23 * (ending == "stutter")
        assert other.calls == []


def test_a_refusal_says_why_and_when_to_come_again(example, cluster):
    cluster.kill("w0")
    wait_until(lambda: not any(model.num_workers for model in models(cluster)), 30, "the router still counts on w0")
    code, [part] = example.run(cluster.endpoints, "complete")
    assert code != 0
    assert part.verdict == "failed"
    assert (part.values["code"], part.values["reason"]) == ("UNAVAILABLE", "NO_WORKERS")
    assert int(part.values["retry_ms"]) > 0


def test_nobody_listens(example, cluster):
    """Without details: no router said this."""
    cluster.kill("r0")
    code, [part] = example.run(cluster.endpoints[:1], "complete")
    assert code != 0
    assert (part.values["code"], part.values["reason"]) == ("UNAVAILABLE", "")


def test_the_library_follows_the_service_config(example):
    """A config that a library cannot read, or does not use, would go unnoticed otherwise."""
    with refusing(2, grpc.StatusCode.RESOURCE_EXHAUSTED) as (router, endpoint):
        code, [part] = example.run([endpoint], "complete")
    assert (code, part.verdict) == (0, "ok")
    assert router.attempts == [0, 1, 2]
