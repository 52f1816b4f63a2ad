"""What clients get is what the runner computes, whatever they ask for and whichever router they ask."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from effort import patience

from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.errors import NoTokenizer
from octavo.request.sampling import FinishReason, SamplingParams
from octavo.v1 import inference_pb2, types_pb2
from octavo.wire.public import sampling_to_wire
from router.streaming import session

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
PROMPT = list(range(3, 40))


async def test_outputs_are_those_of_the_runner(world, oracle):
    await world.start(workers=2, routers=2)
    for params in (
        SamplingParams(seed=7, max_tokens=30),
        SamplingParams(seed=1, n=3, max_tokens=12),
        SamplingParams(seed=2, n=2, best_of=5, max_tokens=9),
        replace(GREEDY, max_tokens=1),
        replace(GREEDY, max_tokens=300, stop=("a", "zz")),
        SamplingParams(seed=5, n=3, max_tokens=200, stop=("q",)),
        SamplingParams(seed=5, n=1, best_of=3, max_tokens=100, stop=("q", "w")),
    ):
        client = world.client(*[0] * bool(params.best_of))
        completions = await asyncio.gather(*(client.complete([*PROMPT, i], params) for i in range(3)))
        for i, completion in enumerate(completions):
            expected = oracle.outputs([*PROMPT, i], params)
            assert oracle.returned(completion) == expected, params
            usage, status = completion.usage, await client.get(completion.request_id)
            assert usage.prompt_tokens == len(PROMPT) + 1
            assert usage.output_tokens == status.usage.output_tokens == sum(len(tokens) for tokens, _, _ in expected)
        await world.until_nothing_left()


async def test_every_token_has_its_log_probability(world):
    """The last token has one too, although the store's notice of the end overtakes the worker's stream. Their sum is
    kept, but not where a router may end the output itself."""
    await world.start()
    client = world.client()
    params = replace(GREEDY, logprobs=2, prompt_logprobs=1)
    for max_tokens in (1, 2, 17):
        for _ in range(5):
            completion = await client.complete(PROMPT, replace(params, max_tokens=max_tokens))
            output = completion.outputs[0]
            assert [score.chosen.token_id for score in output.logprobs] == list(output.token_ids)
            assert all(len(score.top) == 2 for score in output.logprobs)
            assert len(completion.prompt_logprobs) == len(PROMPT) - 1
            assert output.score == pytest.approx(sum(score.chosen.logprob for score in output.logprobs))
            *_, last = [event async for event in client.attach(completion.request_id)]
            assert (last.score, last.logprobs) == (output.score, ())
    for more in ({"logprobs": None}, {"stop": ("no such text",)}):
        assert (await client.complete(PROMPT, replace(params, **more))).outputs[0].score is None


async def test_the_deadline_ends_what_waits_and_what_runs(world):
    """The request ends before the client's own deadline, and what was generated is delivered."""
    await world.start(step_s=0.005)
    client, deadline_s = world.client(), patience(0.8)
    long = replace(GREEDY, max_tokens=8000)  # 40 seconds
    running = [event async for event in client.generate(PROMPT, long, deadline_s=deadline_s)]
    assert running[-1].finish_reason is FinishReason.DEADLINE
    assert sum(len(event.token_ids) for event in running) > 5
    world.routers[0].dispatcher._room_left = lambda model: 0  # nothing is placed any more
    waiting = [event async for event in client.generate(PROMPT, GREEDY, deadline_s=deadline_s)]
    assert [event.finish_reason for event in waiting] == [FinishReason.DEADLINE]


async def test_a_retry_gets_the_first_answer(world):
    """Also when the client gave the first attempt up. The request keeps the deadline of the first."""
    await world.start(routers=2, step_s=0.005)
    first, second = world.stub(0), world.stub(1)
    given_up = first.Complete(request("retried", max_tokens=8000), timeout=patience(0.8))
    await world.until(lambda: len(world.routers[0].sessions) == 1)
    given_up.cancel()
    answer = await second.Complete(request("retried", max_tokens=8000))
    again = await second.Complete(request("retried", max_tokens=8000))
    assert answer.outputs[0].finish_reason == types_pb2.FINISH_REASON_DEADLINE
    assert again.outputs == answer.outputs


async def test_a_router_says_that_it_has_accepted(world):
    """Before the first event, for which nothing runs here."""
    await world.start()
    world.routers[0].dispatcher._room_left = lambda model: 0
    stub = world.stub()
    call = stub.Generate(request("early"))
    async with asyncio.timeout(patience(10)):
        await call.initial_metadata()
        assert not call.done()
        again = stub.Attach(inference_pb2.AttachRequest(request_id="early"))
        await again.initial_metadata()
    assert not again.done()
    for each in (call, again):
        each.cancel()


def request(request_id, **sampling):
    params = sampling_to_wire(replace(GREEDY, **sampling))
    prompt = types_pb2.TokenIds(ids=PROMPT)
    return inference_pb2.GenerateRequest(request_id=request_id, token_ids=prompt, sampling=params)


async def test_models_without_a_tokenizer_answer_with_ids(world):
    runner = FakeRunner(step_s=0.001)
    runner.info = replace(runner.info, tokenizer="", sampling_defaults={"temperature": 0.0, "max_tokens": 7})
    await world.start([runner])
    client = world.client()
    (model,) = await client.models()
    assert not model.has_tokenizer
    assert (model.defaults.temperature, model.defaults.max_tokens, model.defaults.top_p) == (0.0, 7, 1.0)
    (output,) = (await client.complete(PROMPT)).outputs
    greedy = await client.complete(PROMPT, replace(GREEDY, max_tokens=7))
    assert (output.token_ids, output.text) == (greedy.outputs[0].token_ids, ""), "temperature is the model's"
    for refused in (client.complete("abc"), client.tokenize("abc"), client.detokenize([1])):
        with pytest.raises(NoTokenizer, match="tokenizer"):
            await refused


@pytest.mark.parametrize("limit", [session.MAX_INBOX_TOKENS, 50])
async def test_slow_readers_get_few_large_events(world, oracle, monkeypatch, limit):
    """Beyond the limit, what waits is dropped and read from the journals."""
    monkeypatch.setattr(session, "MAX_INBOX_TOKENS", limit)
    router = await world.start(step_s=0.0)
    largest, deliver = 0, router.sessions.deliver_item

    def deliver_item(item):
        nonlocal largest
        largest = max(largest, len(item.token_ids))
        return deliver(item)

    router.sessions.deliver_item = deliver_item
    context = SimpleNamespace(time_remaining=lambda: None, send_initial_metadata=AsyncMock())
    events = router.inference.Generate(
        request("slow", max_tokens=400), context
    )  # gRPC asks for the next one when one is sent
    tokens, num_events = list((await anext(events)).token_ids), 1
    (slow,) = router.sessions._all()
    most = 0

    def has_ended():
        nonlocal most
        most = max(most, slow._inbox.num_tokens)
        return world.entry("slow").record.state.ended

    await world.until(has_ended, 60)
    await asyncio.sleep(0.2)  # the last items come
    async for event in events:
        tokens += event.token_ids
        num_events += 1
    ((expected, _, _),) = oracle.outputs(PROMPT, replace(GREEDY, max_tokens=400))
    assert tuple(tokens) == expected
    assert num_events < 20
    assert most <= max(limit, largest)
