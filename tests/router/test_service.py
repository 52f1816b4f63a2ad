"""What clients get is what the runner computes, whatever they ask for and whichever router they ask."""

import asyncio
from collections import Counter
from dataclasses import replace

import grpc
import pytest

from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.errors import DeadlineExceeded, NotFound, NoTokenizer, QueueFull
from octavo.request.hashing import block_hashes, root_key
from octavo.request.sampling import FinishReason, SamplingParams
from octavo.store.memory import MemoryStore
from octavo.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from octavo.wire import statuses
from octavo.wire.channel import open_channel
from octavo.wire.public import sampling_to_wire
from router.fleet.worker_link import WorkerLink

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
PROMPT = list(range(3, 40))


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(seed=7, max_tokens=30),
        SamplingParams(seed=1, n=3, max_tokens=12),
        SamplingParams(seed=2, n=2, best_of=5, max_tokens=9),
        replace(GREEDY, max_tokens=1),
        replace(GREEDY, max_tokens=300, stop=("a", "zz")),
        SamplingParams(seed=5, n=3, max_tokens=200, stop=("q",)),
        SamplingParams(seed=5, n=1, best_of=3, max_tokens=100, stop=("q", "w")),
    ],
    ids=lambda p: f"n{p.n}-best{p.best_of}-max{p.max_tokens}-{''.join(p.stop)}",
)
async def test_outputs_are_those_of_the_runner(world, oracle, params):
    await world.start(workers=2, routers=1 if params.best_of else 2)
    client = world.client()
    completions = await asyncio.gather(*(client.complete([*PROMPT, i], params) for i in range(6)))
    for i, completion in enumerate(completions):
        expected = oracle.outputs([*PROMPT, i], params)
        assert oracle.returned(completion) == expected
        assert completion.usage.prompt_tokens == len(PROMPT) + 1
        assert completion.usage.output_tokens == sum(len(tokens) for tokens, _, _ in expected)
        status = await client.get(completion.request_id)
        assert status.usage.output_tokens == completion.usage.output_tokens
    await world.until(lambda: not any(len(router.sessions) for router in world.routers))
    world.check_nothing_left()


async def test_every_token_has_its_log_probability(world):
    """The last token has one too, although the store's notice of the end overtakes the worker's stream."""
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


async def test_a_quiet_request_costs_the_store_few_reads(world, monkeypatch):
    """Neither this router's own notices nor a worker that does not know the sequence yet cause a storm of reads.

    The assigner reads once. So does each look at what may still be on its way, when the end's notice comes first.
    """
    monkeypatch.setattr("router.streaming.record_poller.SILENCE_S", 60.0)  # however slow this machine is
    store = Counting(world.state)
    await world.worker()
    await world.router(store)
    await world.ready()
    for max_tokens in (20, 120):
        store.counts.clear()
        await world.client().complete(PROMPT, replace(GREEDY, max_tokens=max_tokens))
        assert store.counts["read"] <= 6, store.counts


class Counting(MemoryStore):
    """A store that counts the calls of its functions."""

    def __init__(self, state) -> None:
        super().__init__(state)
        self.counts = Counter()

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if asyncio.iscoroutinefunction(found):
            self.counts[name] += 1
        return found


async def test_cached_prefixes_attract_and_are_reported(world):
    await world.start(workers=3)
    client, router = world.client(), world.routers[0]
    prompt = list(range(5, 5 + 16 * 8))
    first = await client.complete(prompt, replace(GREEDY, max_tokens=4))
    assert first.usage.cached_tokens == 0
    index, root = router.pool.kv_index, root_key("fake-1000-False", "fake-16")
    warm = world.entry(first.request_id).record.owner
    await world.until(lambda: warm in index.find_hits(block_hashes(root, prompt, 16)))
    links = router.pool.links.values()
    for tail in range(6):
        await world.until(lambda: all(link.load.num_running + link.load.num_prefill_tokens == 0 for link in links))
        completion = await client.complete([*prompt, tail], replace(GREEDY, max_tokens=4))
        assert world.entry(completion.request_id).record.owner == warm
        assert completion.usage.cached_tokens == len(prompt)


async def test_one_request_joined_by_many_runs_once(world, oracle):
    await world.start(workers=2, routers=2)
    params = replace(GREEDY, max_tokens=80)
    calls = [world.client(i % 2).complete(PROMPT, params, request_id="same") for i in range(5)]
    for completion in await asyncio.gather(*calls):
        assert oracle.returned(completion) == oracle.outputs(PROMPT, params)
    assert world.entry("same").record.epoch == 1


@pytest.mark.parametrize(
    "params",
    [
        replace(GREEDY, max_tokens=40, stop=("kk",)),
        SamplingParams(seed=3, n=2, best_of=4, max_tokens=30),
        SamplingParams(seed=3, n=3, max_tokens=30),
    ],
    ids=["greedy", "ranked", "n"],
)
async def test_a_stream_can_be_resumed_from_every_place(world, oracle, params):
    """A client that resumes by token or by index, on any router, while the request runs or later, gets the rest."""
    await world.start(workers=1, routers=2)
    first, other = world.client(0), world.client(1)
    expected = oracle.outputs(PROMPT, params)
    seen, joins = [], []
    async with first.generate(PROMPT, params, request_id="one") as stream:
        async for event in stream:
            seen.append(event)
            joins.append((len(seen), asyncio.create_task(rest_of(other, event.resume_token))))
    joins += [(count, asyncio.create_task(rest_of(other, seen[count - 1].resume_token))) for count, _ in joins]
    for count, join in joins:
        assert joined([*seen[:count], *await join], params.n) == [(tokens, text) for tokens, text, _ in expected]
    for start in (0, 1, 7):
        events = [event async for event in other.attach("one", next_indexes=[start] * params.n)]
        tokens = [tokens[start:] for tokens, _, _ in expected]
        assert [got for got, _ in joined(events, params.n)] == tokens
        again = await rest_of(first, events[0].resume_token)
        assert [got for got, _ in joined([events[0], *again], params.n)] == tokens


async def rest_of(client, resume_token) -> list:
    return [event async for event in client.attach(resume_token=resume_token)]


def joined(events, num_branches) -> list[tuple[tuple[int, ...], str]]:
    """The (tokens, text) of each branch."""
    mine = [[event for event in events if event.branch == branch] for branch in range(num_branches)]
    return [(tuple(t for e in each for t in e.token_ids), "".join(e.text for e in each)) for each in mine]


async def test_cancel_ends_what_waits_and_what_runs(world):
    await world.start()
    client = world.client()
    stream = client.generate(PROMPT, replace(GREEDY, max_tokens=5000), request_id="long")
    await anext(stream)
    await client.cancel("long")
    last = [event async for event in stream][-1]
    assert last.finish_reason is FinishReason.CANCELLED
    await client.cancel("long")
    with pytest.raises(NotFound):
        await client.cancel("nobody")
    await world.until(lambda: not world.workers[0].workload.sequences)


async def test_the_deadline_ends_what_waits_and_what_runs(world):
    """The request ends before the client's own deadline, and what was generated is delivered."""
    await world.start()
    client = world.client()
    running = [event async for event in client.generate(PROMPT, replace(GREEDY, max_tokens=8000), deadline_s=0.4)]
    assert running[-1].finish_reason is FinishReason.DEADLINE
    assert len(running) > 5
    world.routers[0].dispatcher._room_left = lambda: 0  # nothing is placed any more
    waiting = [event async for event in client.generate(PROMPT, GREEDY, deadline_s=0.4)]
    assert [event.finish_reason for event in waiting] == [FinishReason.DEADLINE]


async def test_the_deadline_of_an_attach_is_of_that_call_alone(world):
    await world.start()
    stub = raw(world, world.routers[0])
    call = stub.Generate(request("long", max_tokens=8000))
    await call.read()
    with pytest.raises(DeadlineExceeded), statuses.serving_errors():
        async for _ in stub.Attach(inference_pb2.AttachRequest(request_id="long"), timeout=0.2):
            pass
    status = await stub.Get(inference_pb2.GetRequest(request_id="long"))
    assert status.state == inference_pb2.REQUEST_STATE_RUNNING
    call.cancel()
    await world.until(lambda: len(world.routers[0].sessions) == 0)


async def test_a_retry_of_complete_with_its_request_id_gets_the_first_answer(world):
    """Also when the client gave the first attempt up. The request keeps the deadline of the first."""
    await world.start(routers=2)
    first, second = (raw(world, router) for router in world.routers)
    given_up = first.Complete(request("retried", max_tokens=8000), timeout=0.5)
    await world.until(lambda: len(world.routers[0].sessions) == 1)
    given_up.cancel()
    answer = await second.Complete(request("retried", max_tokens=8000))
    again = await second.Complete(request("retried", max_tokens=8000))
    assert answer.outputs[0].finish_reason == types_pb2.FINISH_REASON_DEADLINE
    assert again.outputs == answer.outputs


async def test_a_request_may_name_its_model_by_an_alias(world, oracle):
    await world.worker()
    name = world.workers[0].workload.info.model
    await world.router(model_aliases=(f"chat={name}",))
    await world.ready()
    completion = await world.client().complete(PROMPT, GREEDY, model="chat")
    assert oracle.returned(completion) == oracle.outputs(PROMPT, GREEDY)
    reply = await raw(world, world.routers[0]).ListModels(inference_pb2.ListModelsRequest())
    assert [(model.name, list(model.aliases)) for model in reply.models] == [(name, ["chat"])]


async def test_a_full_queue_says_when_to_come_back(world):
    await world.worker()
    router = await world.router(max_queued_requests=2)
    await world.ready()
    router.dispatcher._room_left = lambda: 0
    stub = raw(world, router)
    waiting = [stub.Generate(request(f"w{i}")) for i in range(2)]
    await world.until(lambda: len(world.state.queue) == 2)
    with pytest.raises(QueueFull) as caught, statuses.serving_errors():
        await stub.Complete(request("third"))
    assert caught.value.retry_after_ms > 0
    for call in waiting:
        call.cancel()
    await world.until(lambda: len(router.sessions) == 0)


def request(request_id, **sampling):
    params = sampling_to_wire(replace(GREEDY, **sampling))
    prompt = types_pb2.TokenIds(ids=PROMPT)
    return inference_pb2.GenerateRequest(request_id=request_id, token_ids=prompt, sampling=params)


def raw(world, router):
    channel = open_channel(router.endpoint)
    world.stack.push_async_callback(channel.close)
    return inference_pb2_grpc.InferenceStub(channel)


async def test_a_session_waits_for_the_worker_s_stream_where_the_store_was_faster(world):
    """The journals have the tokens, and only the worker's stream has their log probabilities."""
    await world.start()
    sessions, loop = world.routers[0].sessions, asyncio.get_running_loop()
    deliver = sessions.deliver_item
    sessions.deliver_item = lambda item: bool(loop.call_later(0.03, deliver, item))
    for max_tokens in (1, 2, 12):
        output = (await world.client().complete(PROMPT, replace(GREEDY, max_tokens=max_tokens, logprobs=1))).outputs[0]
        assert [score.chosen.token_id for score in output.logprobs] == list(output.token_ids)


async def test_a_client_that_comes_while_another_leaves_is_attached(world):
    store = MemoryStore(world.state)
    detach, leaving = store.detach, asyncio.Event()

    async def slow_detach(*args) -> None:
        leaving.set()
        await asyncio.sleep(0.05)
        await detach(*args)

    store.detach = slow_detach
    await world.worker()
    router = await world.router(store)
    await world.ready()
    client = world.client()
    one = client.generate(PROMPT, replace(GREEDY, max_tokens=2000), request_id="one")
    await anext(one)
    await one.aclose()
    await leaving.wait()
    two = client.attach("one")
    await anext(two)
    await asyncio.sleep(0.1)
    assert world.entry("one").record.routers == (router.incarnation,)
    await client.cancel("one")
    await two.aclose()


async def test_a_model_without_a_tokenizer_answers_with_token_ids(world):
    runner = FakeRunner(step_s=0.001)
    runner.info = replace(runner.info, tokenizer="", sampling_defaults={"temperature": 0.0, "max_tokens": 7})
    await world.worker(runner)
    await world.router()
    await world.ready()
    client = world.client()
    (model,) = await client.models()
    assert not model.has_tokenizer
    assert (model.defaults.temperature, model.defaults.max_tokens, model.defaults.top_p) == (0.0, 7, 1.0)
    completion = await client.complete(PROMPT)
    assert [(len(output.token_ids), output.text) for output in completion.outputs] == [(7, "")]
    greedy = await client.complete(PROMPT, replace(GREEDY, max_tokens=7))
    assert completion.outputs[0].token_ids == greedy.outputs[0].token_ids, "temperature is the model's"
    for refused in (client.complete("abc"), client.tokenize("abc"), client.detokenize([1])):
        with pytest.raises(NoTokenizer, match="tokenizer"):
            await refused


async def test_the_end_at_a_deadline_comes_before_the_call_ends_however_late_the_machine_is(world):
    """Each step takes longer than the margin of a quiet machine. The first calls end without their last event."""
    await world.worker(FakeRunner(step_s=0.15), lease_ms=5000)
    await world.router(lease_ms=5000)
    await world.ready()
    async with grpc_channel(world) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for number in range(12):
            if await ends_in_time(stub, number):
                break
        else:
            pytest.fail("the margin does not follow")
        for first in range(100, 150, 10):  # a machine that is busier from now on is followed once more
            if sum([await ends_in_time(stub, first + number) for number in range(6)]) >= 5:
                break
        else:
            pytest.fail("the margin is not kept")


def grpc_channel(world):
    return open_channel(world.routers[0].endpoint)


async def ends_in_time(stub, number: int) -> bool:
    """Whether the last event arrives before the deadline of the call."""
    request = inference_pb2.GenerateRequest(request_id=f"late-{number}", raw_text=b"Hello")
    request.sampling.max_tokens = 1000
    last = None
    try:
        async for message in stub.Generate(request, timeout=1.2):
            last = message
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        return False
    assert last.finish_reason == types_pb2.FINISH_REASON_DEADLINE
    return True


async def test_a_session_that_is_opened_while_its_sequence_is_scheduled_gets_the_items(world, oracle, monkeypatch):
    """Schedule did not ask for them, since there was no session then. Silence would bring them a second later."""
    monkeypatch.setattr("router.streaming.record_poller.SILENCE_S", 3600.0)
    schedule = WorkerLink.schedule

    async def schedule_slowly(link, admission, follow):
        answer = await schedule(link, admission, follow)
        asked.append(follow)
        await asyncio.sleep(0.3)
        return answer

    class SlowStore(MemoryStore):
        async def accept(self, new, limits):
            reply = await super().accept(new, limits)
            router.dispatcher.note_queued()
            await world.until(lambda: asked)
            return reply

    asked: list[bool] = []
    monkeypatch.setattr(WorkerLink, "schedule", schedule_slowly)
    await world.worker(lease_ms=60_000)
    router = await world.router(SlowStore(world.state), lease_ms=60_000)
    await world.ready()
    async with asyncio.timeout(20):
        completion = await world.client().complete(PROMPT, GREEDY)
    assert oracle.returned(completion) == oracle.outputs(PROMPT, GREEDY)
    assert asked == [False]
