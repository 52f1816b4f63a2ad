"""Named prefixes: workers have them before anybody asks, and keep them; requests that name one begin with it."""

from dataclasses import replace

import grpc
import pytest

from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.errors import InvalidArgument, NotFound
from octavo.request.named_prefix import MAX_PREFIXES
from octavo.request.sampling import SamplingParams
from octavo.v1 import admin_pb2
from octavo.wire import statuses
from router.prefixes import prefix_keeper, prefix_maker

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
TEXT = "The law of the sea, in as many words as fill some blocks. " * 3


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for module in (prefix_keeper, prefix_maker):
        monkeypatch.setattr(module, "ROUND_S", 0.05)


async def prefixes_of(admin):
    listed = await admin.ListPrefixes(admin_pb2.ListPrefixesRequest())
    return {each.name: each for each in listed.prefixes}


async def until_warm(world, admin, name, count):
    """The workers that have it, once so many do and all routers know it."""

    def warm(router):
        return [on for each in router.prefixes.all() if each.name == name for on in router.prefix_keeper.warm_on(each)]

    await world.until(lambda: all(len(warm(router)) == count for router in world.routers), timeout_s=30)
    assert list((await prefixes_of(admin))[name].warm_on) == warm(world.routers[0])
    return warm(world.routers[0])


async def test_a_prefix_is_warm_before_it_is_asked_for_until_it_is_removed(world):
    await world.start(workers=3, routers=2)
    admin, client = world.admin(), world.client()
    added = await admin.AddPrefix(admin_pb2.AddPrefixRequest(name="sea", text=TEXT, workers=2))
    assert added.prefix.num_tokens == len(TEXT)
    before = await until_warm(world, admin, "sea", 2)
    indices = [router.pool.kv_index for router in world.routers]  # which learn of blocks after the keepers do
    await world.until(lambda: all(each.num_blocks["device"] >= len(TEXT) // 16 for each in indices))
    whole = await client.complete(TEXT + "Who?", GREEDY)
    assert whole.usage.cached_tokens >= len(TEXT) // 16 * 16
    named = await client.complete("Who?", GREEDY, prefix="sea")
    assert named.outputs[0].token_ids == whole.outputs[0].token_ids
    assert named.usage.prompt_tokens == whole.usage.prompt_tokens
    counts = [(await prefixes_of(world.admin(router)))["sea"].num_requests for router in (0, 1)]
    assert sum(counts) == 2
    await world.kill(world.workers[int(before[0].removeprefix("worker-"))])
    await world.until(lambda: before[0] not in world.routers[0].prefix_keeper.warm_on(one(world)), timeout_s=30)
    assert before[1] in await until_warm(world, admin, "sea", 2)
    await world.until(lambda: all(each.workload.tables.cache.num_kept for each in world.workers))
    await world.admin(1).RemovePrefix(admin_pb2.RemovePrefixRequest(name="sea"))
    assert not await prefixes_of(admin)
    with pytest.raises(NotFound, match="no prefix 'sea'"):
        await client.complete("Who?", GREEDY, prefix="sea")
    await world.until(lambda: not any(each.workload.tables.cache.kept for each in world.workers))


def one(world):
    (prefix,) = world.routers[0].prefixes.all()
    return prefix


async def test_half_of_a_worker_is_kept_at_most(world):
    await world.start([FakeRunner(step_s=0.001, num_blocks=16, block_size=16)])
    admin = world.admin()
    for name in ("a", "b"):
        await admin.AddPrefix(admin_pb2.AddPrefixRequest(name=name, text=name + TEXT[:95]))
    await until_warm(world, admin, "a", 1)
    await world.until(lambda: world.workers[0].workload.tables.cache.num_kept == 6, timeout_s=30)
    shown = await prefixes_of(admin)
    assert (list(shown["a"].full_on), list(shown["b"].full_on)) == ([], ["worker-0"])


async def test_bad_prefixes_are_refused_by_name(world):
    await world.start()
    admin, client = world.admin(), world.client()
    good = admin_pb2.AddPrefixRequest(name="sea", text=TEXT)
    for field, bad in (
        ("name", {"name": "a b"}),
        ("name", {"name": ""}),
        ("text", {"text": "short"}),
        ("text", {"text": "long" * 5000}),
        ("chat", {"system": TEXT}),
        ("tenant", {"tenant": "nobody"}),
    ):
        request = admin_pb2.AddPrefixRequest(name="sea", text=TEXT)
        request.MergeFrom(admin_pb2.AddPrefixRequest(**bad)) if bad != {"name": ""} else request.ClearField("name")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await admin.AddPrefix(request)
        assert statuses.error_from(refused.value).field == field, bad
    for number in range(MAX_PREFIXES):
        await admin.AddPrefix(admin_pb2.AddPrefixRequest(name=f"sea{number}", text=TEXT))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await admin.AddPrefix(good)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(InvalidArgument) as begins_texts:
        await client.complete([{"role": "user", "content": "x"}], GREEDY, prefix="sea0")
    assert begins_texts.value.field == "prefix"
    with pytest.raises(NotFound):
        await client.complete("x", replace(GREEDY), prefix="none")


async def test_a_prefix_is_one_of_the_model_that_has_the_name_of_its_own_now(world):
    await world.start([FakeRunner(step_s=0.001, model="words")], lease_ms=2000)
    admin = world.admin()
    await admin.AddPrefix(admin_pb2.AddPrefixRequest(name="sea", text=TEXT, workers=2))
    await until_warm(world, admin, "sea", 1)
    before = one(world)
    await world.kill(world.workers[0])
    await world.worker(FakeRunner(step_s=0.001, model="words", vocab_size=900))
    await world.until(lambda: one(world).model != before.model, timeout_s=30)
    assert replace(one(world), model=before.model) == before
    await until_warm(world, admin, "sea", 1)
    assert (await world.client().complete("Who?", GREEDY, prefix="sea")).usage.prompt_tokens == len(TEXT) + 4
    await admin.RemovePrefix(admin_pb2.RemovePrefixRequest(name="sea"))
    assert not await prefixes_of(admin)
