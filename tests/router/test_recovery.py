"""Whatever a worker does, dies, hangs or refuses: no token is lost, doubled or changed, and every request ends."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest
from slow_beams import best_outputs

from gpu_worker.testing.fake_runner import FakeRunner
from octavo.client import AsyncClient, RetryPolicy
from octavo.request.errors import (
    NoWorkers,
    OutOfBlocks,
    RequestExists,
    RunnerFailed,
    ServingError,
    TooLarge,
    TooManyStreams,
)
from octavo.request.ids import Incarnation
from octavo.request.record import AdmissionAnswer, AdmissionOutcome, SequenceState
from octavo.request.sampling import FinishReason, SamplingParams
from octavo.request.step_item import StepItem
from octavo.store.calls import Member, TakeReason, TakeRequest
from octavo.store.memory import MemoryStore, sweep
from octavo.v1 import admin_pb2, admin_pb2_grpc
from octavo.wire.channel import open_channel
from router.fleet.worker_link import ProbeResult
from router.streaming import owner_link

GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
PROMPT = list(range(3, 40))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=4, n=2, max_tokens=50)], ids=["greedy", "n2"])
async def test_a_lost_worker_costs_no_token(world, oracle, params):
    for _ in range(2):
        await world.worker(FakeRunner(step_s=0.01))
    for _ in range(2):
        await world.router()
    await world.ready()
    tasks = await world.streams(world.client(), 6, params)
    await world.kill(world.workers[0])
    await oracle.check_completions(tasks, params)
    epochs = [world.entry(f"s{i}").record.epoch for i in range(6)]
    assert max(epochs) > 1
    assert all(world.entry(f"s{i}").record.state is SequenceState.DONE for i in range(6))


async def test_beams_of_a_lost_worker_end_at_the_same_stop_strings(world):
    """Nothing of a search is journalled before its end, so the next worker searches from the prompt again."""
    params = SamplingParams(n=2, beam_width=3, max_tokens=40, min_tokens=20, stop=("a", "q", "%", "5"))
    for _ in range(2):
        await world.worker(FakeRunner(step_s=0.02, vocab_size=128))
    await world.router()
    await world.ready()
    client, info = world.client(), world.runners[0].info
    tasks = [asyncio.create_task(client.complete([*PROMPT, i], params, request_id=f"s{i}")) for i in range(4)]
    running = [lambda i=i: world.entry(f"s{i}").record.owner for i in range(4)]
    await world.until(lambda: len(world.state._entries) == 4 and all(owner() for owner in running))
    await asyncio.sleep(0.1)
    await world.kill(world.workers[0])
    for i, completion in enumerate(await asyncio.gather(*tasks)):
        expected = best_outputs(info, [*PROMPT, i], params)
        got = [(tuple(output.token_ids), output.text, output.finish_reason) for output in completion.outputs]
        assert got == [(best.token_ids, best.text, best.finish) for best in expected]
        scores = world.entry(f"s{i}").record.scores
        assert list(scores) == pytest.approx([best.total for best in expected])
    assert max(world.entry(f"s{i}").record.epoch for i in range(4)) > 1


SCORED = SamplingParams(temperature=0.0, max_tokens=60, logprobs=3, prompt_logprobs=2)


@pytest.mark.parametrize(
    "params",
    [
        SCORED,
        replace(SCORED, prompt_logprobs=None),
        replace(SCORED, logprobs=None),
        replace(SCORED, temperature=1.0, seed=4, n=2),
        replace(SCORED, temperature=1.0, seed=4, best_of=2),
    ],
    ids=["both", "output", "prompt", "n2", "best_of"],
)
async def test_log_probabilities_survive_a_lost_worker(world, params):
    for _ in range(2):
        await world.worker(FakeRunner(step_s=0.01))
    for _ in range(2):
        await world.router()
    await world.ready()
    client = world.client()
    tasks = await world.streams(client, 4, params)
    await world.kill(world.workers[0])
    for i, task in enumerate(tasks):
        completion, whole = await task, await client.complete([*PROMPT, i], params)
        assert completion.prompt_logprobs == whole.prompt_logprobs
        assert [output.logprobs for output in completion.outputs] == [output.logprobs for output in whole.outputs]
        assert [output.token_ids for output in completion.outputs] == [output.token_ids for output in whole.outputs]
    assert max(world.entry(f"s{i}").record.epoch for i in range(4)) > 1


async def test_log_probabilities_survive_a_lost_router(world):
    await world.worker(FakeRunner(step_s=0.01))
    for _ in range(2):
        await world.router()
    await world.ready()
    whole = await world.client().complete(PROMPT, SCORED)
    stream = world.client(0).generate(PROMPT, SCORED, request_id="scored")
    seen = [await anext(stream) for _ in range(5)]
    await stream.aclose()
    await asyncio.sleep(0.15)  # some tokens are journalled while no client is there
    rest = world.client(1).attach(resume_token=seen[-1].resume_token)
    seen += [event async for event in rest]
    assert tuple(score for event in seen for score in event.logprobs) == whole.outputs[0].logprobs
    assert tuple(score for event in seen for score in event.prompt_logprobs) == whole.prompt_logprobs
    late = await gathered(world.client(1).attach(request_id="scored"))
    assert late == whole.outputs[0].token_ids


async def gathered(stream) -> tuple[int, ...]:
    return tuple([token async for event in stream for token in event.token_ids])


class Moody(FakeRunner):
    """A runner whose tokens depend on its mood, so that a delivered token that is computed again would be seen."""

    def __init__(self, mood: int, **options) -> None:
        super().__init__(**options)
        sample = self._choose.sample
        self._choose.sample = lambda state, samples, output: sample(state + mood, samples, output)


async def test_a_replay_begins_where_the_journal_ends(world):
    for mood in range(2):
        await world.worker(Moody(mood, step_s=0.01))
    await world.router()
    await world.ready()
    client = world.client()
    stream = client.generate(PROMPT, GREEDY, request_id="moody")
    seen = [await anext(stream) for _ in range(10)]
    owner = world.entry("moody").record.owner
    await world.kill(next(w for w in world.workers if w.listener.incarnation == owner))
    seen += [event async for event in stream]
    tokens = [token for event in seen for token in event.token_ids]
    entry = world.entry("moody")
    assert tokens == entry.journals[0]
    assert (entry.record.state, entry.record.epoch, len(tokens)) == (SequenceState.DONE, 2, GREEDY.max_tokens)


async def test_the_old_owner_may_journal_until_the_take(world):
    """What the owner journals between the router's first read and the take is part of the replay."""
    for mood in range(2):
        await world.worker(Moody(mood, step_s=0.01))

    class Slow(MemoryStore):
        async def take_ownership(self, request):
            if request.reason is not TakeReason.QUEUED:
                await asyncio.sleep(0.1)
            return await super().take_ownership(request)

    router = await world.router(Slow(world.state))
    await world.ready()
    stream = world.client().generate(PROMPT, GREEDY, request_id="moody")
    seen = [await anext(stream) for _ in range(5)]
    router.dispatcher.recover_sequence(
        world.entry("moody").record.seq_id, 1, TakeReason.REFUSED
    )  # though it runs there
    seen += [event async for event in stream]
    assert [token for event in seen for token in event.token_ids] == world.entry("moody").journals[0]
    assert world.entry("moody").record.epoch == 2
    assert seen[-1].finish_reason is FinishReason.LENGTH


async def test_a_failure_that_an_earlier_owner_reports_ends_no_request(world):
    """It ends the stream that was told of it, whose client has then left."""
    await world.worker(FakeRunner(step_s=0.01))
    await world.router()
    await world.ready()
    stream = world.client().generate(PROMPT, replace(GREEDY, max_tokens=4000), request_id="goes on")
    for _ in range(3):
        await anext(stream)
    record, session = world.entry("goes on").record, world.routers[0].sessions._all()[0]
    at, chain = session._delivery.readers[0].next_index, session._delivery.readers[0].chain
    late = StepItem(record.seq_id, 0, 0, at, (), chain, FinishReason.ERROR, RunnerFailed("late").failure())
    session.deliver_item(late)
    with pytest.raises(RunnerFailed):
        async for _ in stream:
            pass
    assert record.state is SequenceState.RUNNING
    await world.until(lambda: record.state is SequenceState.CANCELLED)


async def test_a_process_at_the_same_address_is_another_worker(world, oracle):
    await world.start()
    old = world.workers[0]
    tasks = await world.streams(world.client(), 2, replace(GREEDY, max_tokens=120))
    await world.kill(old)
    await world.worker(FakeRunner(step_s=0.01))
    await oracle.check_completions(tasks, replace(GREEDY, max_tokens=120))


async def find_gone() -> ProbeResult:
    return ProbeResult.GONE


@pytest.mark.parametrize("lease_ms", [500, 60_000], ids=["renews", "lapsed"])
async def test_a_worker_that_was_taken_for_dead_and_lives_is_linked_again(world, lease_ms):
    """Soon after the store shows that it lives: it renews its lease, or has one again that had ended."""
    await world.worker(lease_ms=lease_ms)
    await world.router()
    await world.ready()
    router, worker = world.routers[0], world.workers[0]
    link = router.pool.find_link(worker.listener.incarnation)
    link.probe = find_gone
    await router.pool._examine_broken(link)
    assert router.pool.has_lost(worker.listener.incarnation)
    assert not link.view().available
    if lease_ms == 60_000:
        members = world.state.members["worker"]
        members[worker.listener.incarnation] = (members[worker.listener.incarnation][0], 0)
        await world.until(lambda: not link.has_lease)
        worker.lease._start_renewal()
    await world.until(lambda: router.pool.links.get(worker.listener.incarnation) not in (None, link))
    await world.ready()
    assert not router.pool.has_lost(worker.listener.incarnation)
    await world.client().complete(PROMPT, GREEDY)


async def test_a_step_stream_that_breaks_is_opened_again(world, oracle):
    """The connection is lost and the worker is not, so no sequence changes its owner."""
    await world.worker(FakeRunner(step_s=0.01))
    await world.router()
    await world.ready()
    tasks = await world.streams(world.client(), 3)
    for _ in range(3):
        world.workers[0].publisher.end_subscriptions()
        await asyncio.sleep(0.05)
    await oracle.check_completions(tasks)
    assert {world.entry(f"s{i}").record.epoch for i in range(3)} == {1}


async def test_no_room_anywhere_waits_without_spinning(world, oracle):
    await world.start(workers=2)
    admits = 0

    async def later(admission, router_id):
        nonlocal admits
        admits += 1
        return AdmissionAnswer(AdmissionOutcome.LATER, OutOfBlocks("full").failure())

    real = [worker.admissions.admit for worker in world.workers]
    for worker in world.workers:
        worker.admissions.admit = later
    task = asyncio.create_task(world.client().complete([*PROMPT, 0], GREEDY))
    await world.until(lambda: admits >= 2)
    await asyncio.sleep(0.5)
    assert admits < 60  # once per worker and report, and not as fast as it goes
    for worker, admit in zip(world.workers, real, strict=True):
        worker.admissions.admit = admit
    await oracle.check_completions([task])


async def test_what_no_worker_can_ever_hold_fails_at_once(world):
    await world.start(workers=2)

    async def never(admission, router_id):
        return AdmissionAnswer(AdmissionOutcome.NEVER, TooLarge("too large").failure())

    for worker in world.workers:
        worker.admissions.admit = never
    with pytest.raises(TooLarge):
        await world.client().complete(PROMPT, GREEDY)
    assert all(link.pending_dispatches.num_tokens == 0 for link in world.routers[0].pool.links.values())


async def test_a_prompt_beyond_all_blocks_fails_at_once(world):
    await world.worker(FakeRunner(num_blocks=4, context_tokens=1000))
    await world.router()
    await world.ready()
    with pytest.raises(TooLarge):
        await world.client().complete(list(range(100)), GREEDY)


async def test_a_model_without_a_worker_keeps_no_other_waiting(world, oracle):
    await world.worker(FakeRunner(model="other", vocab_size=999))
    await world.worker()
    await world.router()
    await world.ready()
    client = world.client()
    other = [asyncio.create_task(client.complete(PROMPT, GREEDY, model="other")) for _ in range(20)]
    await asyncio.sleep(0)
    link = next(link for link in world.routers[0].pool.links.values() if link.hello.model == "other")
    link.has_lease = False
    world.routers[0].pool._update_links = lambda present: asyncio.sleep(0)
    completion = await client.complete([*PROMPT, 1], GREEDY, model="fake")
    assert oracle.returned(completion) == oracle.outputs([*PROMPT, 1], GREEDY)
    link.has_lease = True
    await asyncio.gather(*other)


async def take_for(router, worker, popped):
    """Takes a sequence in the name of a worker that is not told."""
    request = TakeRequest(
        popped.record.seq_id, popped.record.epoch, worker.listener.incarnation, "dead", TakeReason.QUEUED
    )
    return await router.assigner.store.take_ownership(request)


async def test_a_sequence_whose_owner_never_got_it_is_assigned_again(world, oracle, monkeypatch):
    """A router that dies between take and Schedule leaves a sequence that its owner does not know."""
    monkeypatch.setattr(owner_link, "UNKNOWN_FOR_S", 0.2)
    await world.start()
    router, worker = world.routers[0], world.workers[0]
    start, taken = router.assigner.assign_popped, []

    async def take_only(popped):
        if taken:
            return await start(popped)
        taken.append(await take_for(router, worker, popped))
        return None

    router.assigner.assign_popped = take_only
    completion = await world.client().complete([*PROMPT, 0], GREEDY, request_id="limbo")
    assert taken
    assert oracle.returned(completion) == oracle.outputs([*PROMPT, 0], GREEDY)
    assert world.entry("limbo").record.crashes == 0


async def test_cancel_ends_a_sequence_that_no_worker_runs(world, monkeypatch):
    monkeypatch.setattr("router.placing.dispatcher.CANCEL_PATIENCE_S", 0.1)
    await world.start()
    router, worker = world.routers[0], world.workers[0]

    router.assigner.assign_popped = partial(take_for, router, worker)
    client = world.client()
    task = asyncio.create_task(client.complete(PROMPT, GREEDY, request_id="limbo"))
    await world.until(lambda: world.state._entries and world.entry("limbo").record.state is SequenceState.RUNNING)
    await client.cancel("limbo")
    assert (await task).finish_reason is FinishReason.CANCELLED


async def test_a_worker_of_another_layout_is_refused_by_name(world):
    await world.start()
    await world.worker(FakeRunner(block_size=32))
    bad = world.workers.pop()
    router = world.routers[0]
    await world.until(
        lambda: bad.listener.incarnation in router.pool.links and router.pool.find_link(bad.listener.incarnation).hello
    )
    async with open_channel(router._member.info.decode().split('"admin_endpoint": "')[1].split('"')[0]) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        reply = await admin.ListWorkers(admin_pb2.ListWorkersRequest())
    reasons = {status.incarnation: status.reason for status in reply.workers}
    assert "block_size 32" in reasons[bad.listener.incarnation] or "layout" in reasons[bad.listener.incarnation]
    assert reasons[world.workers[0].listener.incarnation] == ""
    for _ in range(4):
        await world.client().complete(PROMPT, GREEDY)
    world.workers.append(bad)


async def test_one_fingerprint_under_two_names_is_two_models(world, oracle):
    """With the same weights and another layout, requests of one name never run on workers of the other."""
    for model, block_size in (("small", 16), ("large", 32)):
        await world.worker(FakeRunner(model=model, block_size=block_size))
    await world.router()
    await world.ready()
    client = world.client()
    for worker, model in zip(world.workers, ("small", "large"), strict=True):
        ids = [f"{model}-{i}" for i in range(8)]  # at once: they spread
        await oracle.check_completions(
            [client.complete([*PROMPT, i], GREEDY, model=model, request_id=id) for i, id in enumerate(ids)]
        )
        assert {world.entry(id).record.owner for id in ids} == {worker.listener.incarnation}


async def test_a_request_goes_on_when_its_model_comes_back_with_another_layout(world, oracle, monkeypatch):
    monkeypatch.setattr("router.fleet.worker_link.UNUSABLE_S", 0.1)
    await world.worker(FakeRunner(step_s=0.01))
    await world.router()
    await world.ready()
    tasks = await world.streams(world.client(), 1)
    await world.kill(world.workers[0])
    await world.worker(FakeRunner(block_size=32))
    await oracle.check_completions(tasks)
    assert world.entry("s0").record.epoch > 1


async def test_a_member_that_describes_itself_badly_disturbs_no_other(world):
    await world.router()
    nowhere = b'{"worker_id": "w", "endpoint": "127.0.0.1:99999"}'
    for info in (b"{}", b"\xff", b"[]", b"7", nowhere):
        await MemoryStore(world.state).heartbeat(Member("worker", Incarnation(f"0{info.hex()}"), info), 60_000)
    await world.worker()
    await world.ready()
    await world.client().complete(PROMPT, GREEDY)


async def test_who_sends_a_request_again_keeps_it_alive(world, oracle, monkeypatch):
    """Its router and all workers are gone. The router that comes instead knows no model, and yet finds the request."""
    monkeypatch.setattr(sweep, "ROUTER_LOSS_MS", 0)
    await world.worker(FakeRunner(step_s=0.01))
    await world.router()
    await world.ready()
    first = world.client(0).generate(PROMPT, GREEDY, request_id="again")
    await anext(first)
    await world.stop_router(world.routers[0])
    await world._stop_worker(world.workers[0])
    await first.aclose()
    await world.router()  # a request outlives its last client for a second
    refusals: list[ServingError] = []
    policy = RetryPolicy(on_retry=lambda error, since: refusals.append(error))
    async with AsyncClient(world.routers[0].endpoint, policy=policy) as client:
        answer = asyncio.create_task(client.complete(PROMPT, GREEDY, request_id="again"))
        await world.until(lambda: len(refusals) > 4, 30)  # each of them asks for half a second
        assert all(isinstance(error, NoWorkers) for error in refusals)
        assert world.entry("again").record.state is SequenceState.QUEUED
        await world.worker()
        assert oracle.returned(await answer) == oracle.outputs(PROMPT, GREEDY)
        with pytest.raises(RequestExists):
            await client.complete([1], GREEDY, request_id="again")


async def test_who_sends_a_request_again_waits_where_its_model_has_no_worker(world, oracle):
    await world.worker(FakeRunner(step_s=0.01))
    await world.router()
    await world.ready()
    await world.client().generate(PROMPT, GREEDY, request_id="again").__anext__()
    await world._stop_worker(world.workers[0])
    await world.until(lambda: not world.routers[0].models.list_models()[0].workers)
    answer = asyncio.create_task(world.client().complete(PROMPT, GREEDY, request_id="again"))
    await world.until(lambda: world.routers[0].sessions.seq_ids())
    await world.worker()
    assert oracle.returned(await answer) == oracle.outputs(PROMPT, GREEDY)


@pytest.mark.parametrize("method", ["complete", "attach"])
async def test_who_comes_back_to_a_full_router_keeps_the_request(world, oracle, method):
    """A request outlives its last client for a second, and clients that this router refuses, too, for longer."""
    await world.worker(FakeRunner(step_s=0.02))
    await world.router(max_streams=1)
    await world.ready()
    long = replace(GREEDY, max_tokens=200)  # four seconds
    first = world.client().generate(PROMPT, long, request_id="again")
    await anext(first)
    await first.aclose()
    await world.until(lambda: not world.routers[0]._opener.num_sessions)
    other = world.client().generate([1], replace(GREEDY, max_tokens=4000))
    await anext(other)
    refusals: list[ServingError] = []
    policy = RetryPolicy(on_retry=lambda error, since: refusals.append(error), min_retries=100, backoff_cap_s=0.1)
    async with AsyncClient(world.routers[0].endpoint, policy=policy) as client:
        if method == "complete":
            answer = asyncio.create_task(client.complete(PROMPT, long, request_id="again"))
        else:
            answer = asyncio.create_task(gathered(client.attach(request_id="again")))
        await world.until(lambda: len(refusals) > 2, 30)  # each of them asks for a second
        assert all(isinstance(error, TooManyStreams) for error in refusals)
        assert world.entry("again").record.finishes[0] is not FinishReason.CANCELLED
        await other.aclose()
        (tokens, *_) = oracle.outputs(PROMPT, long)[0]
        found = await answer
        assert tokens == (found if method == "attach" else tuple(found.outputs[0].token_ids))
