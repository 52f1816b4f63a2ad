import asyncio
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from octavo.client import AsyncClient, FinishReason, RetryPolicy
from octavo.request import errors
from octavo.v1 import types_pb2

QUICK = RetryPolicy(progress_timeout_s=5.0, backoff_base_s=0.001, backoff_cap_s=0.01)
NUM_TOKENS = 24  # of the router of conftest.py
FAULTS = ["end", "skip", "twice", "swap", "old", "UNAVAILABLE", "CANCELLED", "INTERNAL", "UNKNOWN"]


async def gather(stream):
    tokens, text, finishes = [], "", []
    async for event in stream:
        assert event.first_index == len(tokens)
        tokens += event.token_ids
        text += event.text
        finishes += [event.finish_reason] * bool(event.finish_reason)
    return tokens, text, finishes


@given(
    faults=st.lists(
        st.tuples(st.integers(0, 14), st.sampled_from(FAULTS), st.integers(1, 5), st.integers(0, 3)), max_size=4
    ),
)
@example(faults=[(1, fault, 2, 1) for fault in FAULTS])
@example(faults=[(NUM_TOKENS // 2, "UNAVAILABLE", 2, 1)])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_faults_change_nothing(faults, make_router, serve, script):
    async def run():
        router = make_router()
        router.scripts.extend(script(at, fault, chunk, lag) for at, fault, chunk, lag in faults)
        async with (
            serve(router) as one,
            serve(router) as two,
            AsyncClient([one, two], policy=QUICK) as client,
        ):
            stream = client.generate("hello")
            assert await gather(stream) == (*router.oracle, [FinishReason.LENGTH])
            assert stream.num_reattaches <= len(faults)
            if faults[:1] == [(NUM_TOKENS // 2, "UNAVAILABLE", 2, 1)]:  # after the terminal event: it breaks nothing
                assert [method for method, _ in router.calls] == ["Generate"]

    asyncio.run(run())


async def test_foreign_tokens_give_way_to_id_and_indexes(router, serve, script):
    """And history is lost where the record is."""
    foreign = script(error=errors.ForeignToken("another key"))
    async with serve(router) as one, serve(router) as two, AsyncClient([one, two], policy=QUICK) as client:
        router.scripts += [script(at=3, fault="end", lag=0), foreign, script(lag=0)]
        assert await gather(client.generate("hello")) == (*router.oracle, [FinishReason.LENGTH])
        (_, generate), (_, by_token), (_, by_index) = router.calls
        assert by_token.resume_token
        assert (by_index.request_id, list(by_index.next_indexes)) == (generate.request_id, [6])
        gone = script(error=errors.NotFound("no such request", resource="request"))
        router.scripts += [script(at=3, fault="end"), foreign, gone]
        with pytest.raises(errors.HistoryLost):
            await gather(client.generate("hello"))


async def test_a_refused_request_waits_as_it_is_told(router, serve, script):
    """Until the budget of retries is used up. The policy is told of each."""
    told = []
    policy = replace(QUICK, on_retry=lambda error, trouble_s: told.append((type(error), trouble_s >= 0)))
    router.scripts += [script(error=errors.QueueFull("full", retry_after_ms=150)), script(at=3, fault="UNAVAILABLE")]
    async with serve(router) as endpoint, AsyncClient(endpoint, policy=policy) as client:
        started = asyncio.get_running_loop().time()
        completion = await client.complete("hello")
        assert asyncio.get_running_loop().time() - started >= 0.15
        assert told == [(errors.QueueFull, True), (errors.Unreachable, True)]
        assert (list(completion.token_ids), completion.text) == router.oracle
        assert (completion.usage.prompt_tokens, completion.num_reattaches) == (3, 1)
        router.scripts.extend(script(error=errors.QueueFull("full")) for _ in range(50))
        for _ in range(10):
            with pytest.raises(errors.QueueFull):
                await client.complete("hello")
    assert len(router.calls) <= 3 + 10 + 3 + 1  # those above; ten calls, the minimum, a tenth


@pytest.mark.parametrize("error", [errors.NoWorkers("none"), errors.Loading("soon"), errors.StoreUnavailable("away")])
async def test_whoever_is_missing_is_waited_for(router, serve, script, error):
    """No budget bounds it: the call puts no load on anybody.

    And an accepted request is not given up early, however long its first event is in coming, and however many routers
    die before it: a router has answered.
    """
    error.retry_after_ms = 0
    router.scripts.extend(script(error=error) for _ in range(50))
    router.scripts.extend(script(at=0, fault="UNAVAILABLE", accepts=True) for _ in range(3))
    async with serve(router) as endpoint, AsyncClient(endpoint, policy=QUICK) as client:
        await client.complete("hello")
    assert len(router.calls) == 54
    router.scripts.extend(script(at=0, fault="UNAVAILABLE", accepts=True) for _ in range(3))
    policy = replace(QUICK, first_answer_timeout_s=0.0)
    async with serve(router) as endpoint, AsyncClient(endpoint, policy=policy) as client:
        assert await gather(client.generate("hello")) == (*router.oracle, [FinishReason.LENGTH])


async def test_a_failed_request_raises_after_its_tokens(router, serve):
    router.finish_reason = types_pb2.FINISH_REASON_ERROR
    router.failure = types_pb2.Failure(code=13, reason="POISON_SUSPECTED", message="three died")
    async with serve(router) as endpoint, AsyncClient(endpoint) as client:
        stream = client.generate("hello")
        events = [await anext(stream) for _ in range(12)]
        with pytest.raises(errors.PoisonSuspected, match="three died"):
            await anext(stream)
    assert [token for event in events for token in event.token_ids] == router.oracle[0]
    assert events[-1].finish_reason is FinishReason.ERROR
    assert len(router.calls) == 1


async def test_tokens_before_the_deadline_are_fetched_after_it(router, serve, script):
    router.scripts.append(script(at=4, fault="hang"))
    router.finish_reason = types_pb2.FINISH_REASON_DEADLINE
    async with serve(router) as endpoint, AsyncClient(endpoint, policy=QUICK) as client:
        stream = client.generate("hello", deadline_s=0.3)
        assert await gather(stream) == (*router.oracle, [FinishReason.DEADLINE])
        assert stream.num_reattaches == 0


async def test_attach_begins_where_it_is_told(router, serve):
    router.accepted.add("r")
    tokens, _ = router.oracle
    async with serve(router) as endpoint, AsyncClient(endpoint) as client:
        first = await anext(client.attach("r", next_indexes=[20]))
        assert (first.first_index, list(first.token_ids)) == (20, tokens[20:22])
        whole = client.generate("hello", request_id="r")
        event = await anext(whole)
        rest = [event async for event in client.attach(resume_token=event.resume_token)]
        assert [token for part in rest for token in part.token_ids] == tokens[2:]
        with pytest.raises(errors.NotFound):
            await anext(client.attach("unknown"))
        with pytest.raises(errors.InvalidArgument):
            client.attach()


async def test_unary_calls_are_retried_and_converted(router, serve, script):
    router.scripts.append(script(error=errors.StoreUnavailable("down")))
    async with serve(router) as endpoint, AsyncClient(endpoint, policy=QUICK) as client:
        await client.cancel("r")
        assert router.cancelled == ["r"]
        assert (await client.get("r")).state == "RUNNING"
        assert await client.tokenize("ab") == [97, 98]
        assert await client.detokenize([97, 98]) == "ab"
        (model,) = await client.models()
        assert (model.name, model.vocab_size) == ("m", 7)
    assert [method for method, _ in router.calls[:2]] == ["Cancel", "Cancel"]


async def test_prompts_are_told_by_their_type(router, serve):
    chats = [("user", "é")], [{"role": "user", "content": "é"}]
    kinds = [
        ("a", "text"),
        (b"\xff", "raw_text"),
        ([1], "token_ids"),
        ([], "token_ids"),
        *((each, "chat") for each in chats),
    ]
    async with serve(router) as endpoint, AsyncClient(endpoint) as client:
        for prompt, _ in kinds:
            await client.complete(prompt)
    assert [request.WhichOneof("input") for _, request in router.calls] == [kind for _, kind in kinds]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"top_k": 2**40}, "top_k"),
        ({"max_tokens": -1}, "^max_tokens: must be a whole number, 1 to 4294967295$"),
        ({"temperature": "hot"}, "^temperature: must be a number, 0 to "),
        ({"stop": ["\ud800"]}, "stop"),
        ({"max_tokenz": 1}, r"^max_tokenz: there is no such argument; did you mean max_tokens\?"),
        ({"deadlines": 5}, "did you mean deadline_s"),
        ({"prompt": {"role": "user", "content": "Hi"}}, "^prompt: give a text, token ids, or a list"),
        ({"prompt": ["Hi"]}, "^prompt: give a text, token ids, or a list"),
        ({"prompt": [{"role": "user"}]}, r"^chat\.messages\[0\]: has no content"),
        ({"priority": "urgent"}, "priority"),
        ({"prompt": [-1]}, "token_ids"),
        ({"prompt": "\ud800"}, "text"),
    ],
)
async def test_what_cannot_be_written_down_names_its_field(options, field):
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(errors.InvalidArgument, match=field):
            client.generate(options.pop("prompt", "hello"), **options)
