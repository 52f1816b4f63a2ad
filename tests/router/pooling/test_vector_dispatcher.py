"""The dispatcher alone: what calls that end early, or a worker that answers nonsense, leave behind."""

import asyncio
from types import SimpleNamespace

import pytest
from worker_views import idle_view

from octavo.pooling.params import PoolingParams
from octavo.request.errors import ServingError
from octavo.request.ids import Incarnation
from octavo.wire.pooling import PromptVector
from router.pooling.prompt_queue import VectorCall
from router.pooling.vector_dispatcher import VectorDispatcher

WORKER = Incarnation("w")


class OneWorker:
    """A pool of one worker. A call of it brings the vectors of `indexes`, and lasts unless these are bad."""

    def __init__(self):
        self.incarnation, self.worker_id, self.available = WORKER, "worker-0", True
        self.gone, self.facts, self.indexes = asyncio.Event(), SimpleNamespace(max_batch_tokens=4), []

    def views(self, model):
        return [idle_view(self.worker_id, incarnation=WORKER, available=self.available, max_batch_sequences=8)]

    def find_link(self, incarnation):
        return self

    async def pool(self, prompts, params, **named):
        yield [PromptVector(index, bytes(4)) for index in self.indexes]
        await asyncio.Event().wait()


@pytest.fixture
def worker():
    return OneWorker()


@pytest.fixture
async def dispatcher(worker):
    made = VectorDispatcher(worker)
    yield made
    await made.close()


def call_of(tenant="t"):
    return VectorCall(SimpleNamespace(name="m"), PoolingParams(), tenant, "")


async def settled():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_prompts_of_who_has_left_do_not_wait_behind_others(dispatcher, worker):
    worker.available = False
    prompts = (("t", [[1]]), ("t", [[2]] * 50), ("other", [[3]]))
    stays, leaves, other = [asyncio.create_task(dispatcher.vectors(call_of(t), each)) for t, each in prompts]
    await settled()
    assert len(dispatcher._queue) == 52
    leaves.cancel()
    await settled()
    assert len(dispatcher._queue) == 2 and dispatcher.num_under_way == 2
    stays.cancel()
    other.cancel()
    await settled()
    assert not len(dispatcher._queue) and not dispatcher._queue.turns()


@pytest.mark.parametrize("indexes", [[7], [0, 0]])
async def test_a_worker_that_answers_nonsense_hangs_no_call(dispatcher, worker, indexes, caplog):
    worker.indexes = indexes
    with pytest.raises(ServingError, match="could not be read: KeyError"):
        await asyncio.wait_for(dispatcher.vectors(call_of(), [[1], [2]]), 5)
    await settled()
    assert not dispatcher._shares and not len(dispatcher._queue)
    assert "worker w could not be read" in caplog.text


async def test_what_a_worker_without_a_lease_had_is_sent_again(dispatcher, worker):
    waiting = asyncio.create_task(dispatcher.vectors(call_of(), [[1]]))
    await settled()
    assert not dispatcher.num_sent_again
    worker.gone.set()
    await settled()
    assert dispatcher.num_sent_again["m"] == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
