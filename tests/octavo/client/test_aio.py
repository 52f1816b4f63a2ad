import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.client import AsyncClient, FinishReason, RetryPolicy
from octavo.client.routing import Recovery, RetryBudget
from octavo.request import errors
from octavo.v1 import types_pb2

QUICK = RetryPolicy(progress_timeout_s=5.0, backoff_base_s=0.001, backoff_cap_s=0.01)
FAULTS = ["end", "skip", "twice", "swap", "old", "UNAVAILABLE", "CANCELLED", "INTERNAL", "UNKNOWN"]
BREAKS = ["end", "UNAVAILABLE", "CANCELLED", "INTERNAL", "UNKNOWN"]


async def gather(stream):
    tokens, text, finishes = [], "", []
    async for event in stream:
        assert event.first_index == len(tokens)
        tokens += event.token_ids
        text += event.text
        finishes += [event.finish_reason] * bool(event.finish_reason)
    return tokens, text, finishes


async def test_an_undisturbed_stream_is_the_oracle(router, serve):
    async with serve(router) as endpoint, AsyncClient(endpoint) as client:
        stream = client.generate("hello", max_tokens=24, stop="x")
        assert await gather(stream) == (*router.oracle, [FinishReason.LENGTH])
        assert stream.num_reattaches == 0
    method, request = router.calls[0]
    assert method == "Generate"
    assert (request.text, request.sampling.max_tokens, list(request.sampling.stop)) == ("hello", 24, ["x"])
    assert request.request_id == stream.request_id != ""


@given(
    faults=st.lists(
        st.tuples(st.integers(0, 14), st.sampled_from(FAULTS), st.integers(1, 5), st.integers(0, 3)), max_size=4
    ),
)
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

    asyncio.run(run())


@pytest.mark.parametrize("fault", BREAKS)
async def test_a_broken_stream_goes_on_at_the_next_router(router, make_router, serve, script, fault):
    other = make_router()
    other.accepted = router.accepted
    router.scripts.append(script(at=3, fault=fault))
    async with serve(router) as one, serve(other) as two, AsyncClient([one, two], policy=QUICK) as client:
        stream = client.generate("hello")
        assert await gather(stream) == (*router.oracle, [FinishReason.LENGTH])
        assert stream.num_reattaches == 1
    assert [method for method, _ in router.calls] == ["Generate"]
    (call,) = other.calls
    assert call[0] == "Attach"
    assert call[1].resume_token


async def test_a_token_of_a_key_that_the_store_has_lost_is_replaced_by_id_and_indexes(router, serve, script):
    router.scripts.extend(
        [script(at=3, fault="end", lag=0), script(error=errors.ForeignToken("another key")), script(lag=0)]
    )
    async with serve(router) as one, serve(router) as two, AsyncClient([one, two], policy=QUICK) as client:
        stream = client.generate("hello")
        assert await gather(stream) == (*router.oracle, [FinishReason.LENGTH])
    (_, generate), (_, by_token), (_, by_index) = router.calls
    assert by_token.resume_token
    assert (by_index.request_id, list(by_index.next_indexes)) == (generate.request_id, [6])


async def test_a_record_that_the_store_has_lost_with_its_key_is_lost_history(router, serve, script):
    router.scripts.extend([script(at=3, fault="end"), script(error=errors.ForeignToken("another key"))])
    router.scripts.append(script(error=errors.NotFound("no such request", resource="request")))
    async with serve(router) as endpoint, AsyncClient(endpoint, policy=QUICK) as client:
        with pytest.raises(errors.HistoryLost):
            await gather(client.generate("hello"))


async def test_a_router_that_calls_every_place_a_foreign_token_is_not_asked_for_ever(router, serve, script):
    router.scripts.append(script(at=3, fault="end", lag=0))
    router.scripts.extend([script(error=errors.ForeignToken("another key"))] * 2)
    async with serve(router) as endpoint, AsyncClient(endpoint, policy=QUICK) as client:
        with pytest.raises(errors.ForeignToken):
            await gather(client.generate("hello"))
    assert [method for method, _ in router.calls] == ["Generate", "Attach", "Attach"]


async def test_two_tokens_of_one_stream_may_be_foreign(router, serve, script):
    """As where two versions of routers serve, and the stream goes from one to the other and back."""
    for _ in range(2):
        router.scripts.extend([script(at=3, fault="end", lag=0), script(error=errors.ForeignToken("another key"))])
    router.scripts.append(script(lag=0))
    async with serve(router) as endpoint, AsyncClient(endpoint, policy=QUICK) as client:
        assert await gather(client.generate("hello")) == (*router.oracle, [FinishReason.LENGTH])
    assert [list(request.next_indexes) for _, request in router.calls[2::2]] == [[6], [12]]


async def test_a_foreign_token_of_the_caller_is_the_caller_s_to_replace(router, serve, script):
    router.scripts.append(script(error=errors.ForeignToken("another key")))
    router.accepted.add("r")
    async with serve(router) as endpoint, AsyncClient(endpoint, policy=QUICK) as client:
        with pytest.raises(errors.ForeignToken):
            await gather(client.attach(resume_token=b'["r", 2, 2]'))


@pytest.mark.parametrize("fault", ["UNAVAILABLE", "UNKNOWN"])
async def test_a_connection_that_breaks_after_the_terminal_event_breaks_nothing(router, serve, script, fault):
    router.scripts.append(script(at=len(router.oracle[0]) // 2, fault=fault))
    async with serve(router) as endpoint, AsyncClient(endpoint, policy=QUICK) as client:
        assert await gather(client.generate("hello")) == (*router.oracle, [FinishReason.LENGTH])
    assert [method for method, _ in router.calls] == ["Generate"]


async def test_a_stream_that_breaks_before_its_first_event_is_generated_again_under_the_same_id(router, serve, script):
    router.scripts.extend([script(at=0, fault="UNAVAILABLE"), script(at=0, fault="end")])
    async with serve(router) as endpoint, AsyncClient(endpoint, policy=QUICK) as client:
        assert await gather(client.generate("hello")) == (*router.oracle, [FinishReason.LENGTH])
    assert [method for method, _ in router.calls] == ["Generate"] * 3
    assert len({request.request_id for _, request in router.calls}) == 1


async def test_a_router_that_dies_and_comes_back_is_attached_again(router, make_router, serve):
    router.delay_s = 0.005
    async with AsyncClient("127.0.0.1:1", policy=QUICK) as client:
        async with serve(router) as endpoint:
            client._cells.pool_of("").names = (endpoint,)
            stream = client.generate("hello")
            tokens = list((await anext(stream)).token_ids)
        async with serve(router, port=int(endpoint.rpartition(":")[2])):
            async for event in stream:
                tokens += event.token_ids
        assert tokens == router.oracle[0]
        assert stream.num_reattaches == 1


async def test_a_refused_request_is_tried_again_after_the_delay_asked_for(router, serve, script):
    router.scripts.append(script(error=errors.QueueFull("full", retry_after_ms=150)))
    async with serve(router) as endpoint, AsyncClient(endpoint, policy=QUICK) as client:
        started = asyncio.get_running_loop().time()
        completion = await client.complete("hello")
        assert asyncio.get_running_loop().time() - started >= 0.15
    assert (list(completion.token_ids), completion.text) == router.oracle
    assert (completion.usage.prompt_tokens, completion.num_reattaches) == (3, 0)


async def test_the_budget_ends_retries_of_refused_requests(router, serve, script):
    router.scripts.extend(script(error=errors.QueueFull("full")) for _ in range(50))
    async with serve(router) as endpoint, AsyncClient(endpoint, policy=QUICK) as client:
        for _ in range(10):
            with pytest.raises(errors.QueueFull):
                await client.complete("hello")
    assert len(router.calls) <= 10 + 3 + 1  # ten calls, the minimum, a tenth


@pytest.mark.parametrize("error", [errors.NoWorkers("none"), errors.Loading("soon"), errors.StoreUnavailable("away")])
async def test_whoever_is_missing_is_waited_for(router, serve, script, error):
    """No budget bounds it: the call puts no load on anybody."""
    error.retry_after_ms = 0
    router.scripts.extend(script(error=error) for _ in range(50))
    async with serve(router) as endpoint, AsyncClient(endpoint, policy=QUICK) as client:
        await client.complete("hello")
    assert len(router.calls) == 51


def test_patience_covers_the_load_of_a_model():
    """Where a router has answered; a name at which there is none is found out sooner."""
    for error, patience_s in ((errors.NoWorkers("none"), 300.0), (errors.Unreachable("nobody"), 60.0)):
        recovery = Recovery(RetryPolicy(), RetryBudget())
        recovery.delay_s(error)
        assert recovery._trouble_since is not None
        recovery._trouble_since -= patience_s - 5
        recovery.delay_s(error)
        recovery._trouble_since -= 5
        with pytest.raises(type(error)):
            recovery.delay_s(error)


async def test_an_accepted_stream_is_not_given_up_for_lack_of_budget(router, serve, script):
    router.scripts.append(script(at=1, fault="UNAVAILABLE"))
    router.scripts.extend(script(error=errors.StoreUnavailable("down", retry_after_ms=1)) for _ in range(10))
    async with serve(router) as endpoint, AsyncClient(endpoint, policy=QUICK) as client:
        assert await gather(client.generate("hello")) == (*router.oracle, [FinishReason.LENGTH])


@pytest.mark.parametrize("error", [errors.InvalidArgument("top_p", "no"), errors.NotFound("no model")])
async def test_a_final_answer_is_raised_at_once(router, serve, script, error):
    router.scripts.append(script(error=error))
    async with serve(router) as endpoint, AsyncClient(endpoint) as client:
        with pytest.raises(type(error), match=error.message):
            await client.complete("hello")
    assert len(router.calls) == 1


async def test_no_router_at_all_gives_up_after_the_progress_timeout():
    policy = RetryPolicy(progress_timeout_s=0.2, backoff_base_s=0.01, backoff_cap_s=0.02)
    async with AsyncClient(["127.0.0.1:1", "127.0.0.1:2"], policy=policy) as client:
        with pytest.raises(errors.Unreachable):
            await asyncio.wait_for(client.complete("hello"), 10)
        with pytest.raises(errors.Unreachable):
            await asyncio.wait_for(client.models(), 10)


async def test_a_stream_that_only_ever_repeats_itself_is_given_up(router, serve, script):
    router.scripts.extend(script(at=1, fault="skip") for _ in range(10_000))
    policy = RetryPolicy(progress_timeout_s=0.3, backoff_base_s=0.01, backoff_cap_s=0.02)
    async with serve(router) as endpoint, AsyncClient(endpoint, policy=policy) as client:
        with pytest.raises(errors.Unreachable, match="expected index 2"):
            await asyncio.wait_for(gather(client.generate("hello")), 10)


async def test_a_failed_request_delivers_its_tokens_and_then_raises(router, serve):
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


async def test_what_was_generated_before_the_deadline_is_fetched_after_it(router, serve, script):
    router.scripts.append(script(at=4, fault="hang"))
    router.finish_reason = types_pb2.FINISH_REASON_DEADLINE
    async with serve(router) as endpoint, AsyncClient(endpoint, policy=QUICK) as client:
        stream = client.generate("hello", deadline_s=0.3)
        assert await gather(stream) == (*router.oracle, [FinishReason.DEADLINE])
        assert stream.num_reattaches == 0


async def test_a_deadline_before_acceptance_is_an_error(router, serve, script):
    router.scripts.append(script(error=errors.NoWorkers("none", retry_after_ms=60_000)))
    async with serve(router) as endpoint, AsyncClient(endpoint, policy=QUICK) as client:
        with pytest.raises(errors.NoWorkers):
            await client.complete("hello", deadline_s=0.2)


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


async def test_leaving_a_stream_ends_its_call(router, serve, script):
    router.scripts.append(script(at=1, fault="hang"))
    async with serve(router) as endpoint, AsyncClient(endpoint) as client:
        async with client.generate("hello") as stream:
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


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


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("a", "text"),
        (b"\xff", "raw_text"),
        ([1, 2], "token_ids"),
        ([], "token_ids"),
        ([("user", "é")], "chat"),
        ([{"role": "user", "content": "é"}], "chat"),
    ],
)
async def test_prompts_are_told_by_their_type(router, serve, prompt, kind):
    async with serve(router) as endpoint, AsyncClient(endpoint) as client:
        await client.complete(prompt)
    assert router.calls[0][1].WhichOneof("input") == kind


async def test_chat_messages_may_be_those_of_openai(router, serve):
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
        ("assistant", "Hello!"),
    ]
    async with serve(router) as endpoint, AsyncClient(endpoint) as client:
        await client.complete(turns)
    sent = [(turn.role, turn.content) for turn in router.calls[0][1].chat.messages]
    assert sent == [("system", "Be brief."), ("user", "Hi\nthere"), ("assistant", "Hello!")]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"top_k": 2**40}, "top_k"),
        ({"stop": ["\ud800"]}, "stop"),
        ({"max_tokenz": 1}, r"^max_tokenz: there is no such argument; did you mean max_tokens\?"),
        ({"prompt": {"role": "user", "content": "Hi"}}, "^prompt: give a text, token ids, or a list"),
        ({"prompt": ["Hi"]}, "^prompt: give a text, token ids, or a list"),
        ({"prompt": [{"role": "user"}]}, r"^chat\.messages\[0\]: has no content"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "audio"}]}]},
            r"^chat\.messages\[0\]\.content\[0\]: .*'audio'",
        ),
        ({"priority": "urgent"}, "priority"),
        ({"prompt": [-1]}, "token_ids"),
        ({"prompt": "\ud800"}, "text"),
    ],
)
async def test_what_cannot_be_written_down_names_its_field(options, field):
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(errors.InvalidArgument, match=field):
            client.generate(options.pop("prompt", "hello"), **options)


async def test_connect_returns_at_one_router_and_says_why_there_is_none(router, serve):
    async with serve(router) as endpoint, AsyncClient(["127.0.0.1:1", endpoint]) as client:
        await client.connect(30)
        assert await client.models()
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(errors.Unreachable, match=r"127\.0\.0\.1:1: not connected within 0\.2 s .*refused"):
            await client.connect(0.2)


async def test_the_policy_is_told_of_each_retry(router, serve, script):
    told = []
    router.scripts += [script(error=errors.NoWorkers("none yet")), script(at=3, fault="UNAVAILABLE")]
    policy = RetryPolicy(backoff_base_s=0.001, on_retry=lambda error, trouble_s: told.append((error, trouble_s)))
    async with serve(router) as endpoint, AsyncClient(endpoint, policy=policy) as client:
        assert (await client.complete("hi")).text == router.oracle[1]
    assert [type(error) for error, _ in told] == [errors.NoWorkers, errors.Unreachable]
    assert all(trouble_s >= 0 for _, trouble_s in told)
