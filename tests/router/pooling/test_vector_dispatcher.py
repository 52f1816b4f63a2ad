"""The dispatcher alone: what calls that end early, or a worker that answers nonsense, leave behind."""

import asyncio
from types import SimpleNamespace

import pytest
from worker_views import idle_view

from octavo.pooling.params import PoolingParams
from octavo.request.errors import Loading, NoWorkers, OutOfBlocks, ServingError, TooLarge, Unimplemented
from octavo.request.ids import Incarnation
from octavo.wire.pooling import PromptVector
from router.pooling import vector_dispatcher
from router.pooling.prompt_queue import VectorCall
from router.pooling.vector_dispatcher import VectorDispatcher

WORKER = Incarnation("w")


class OneWorker:
    """A pool of one worker. A call of it brings the vectors of `indexes`, and lasts unless these are bad; or it is the
    next of `answers`, an error or the vectors before its end."""

    def __init__(self):
        self.incarnation, self.worker_id, self.available = WORKER, "worker-0", True
        self.gone, self.facts, self.indexes = asyncio.Event(), SimpleNamespace(max_batch_tokens=4), []
        self.answers = []

    def views(self, model):
        return [idle_view(self.worker_id, incarnation=WORKER, available=self.available, max_batch_sequences=8)]

    def find_link(self, incarnation):
        return self

    async def pool(self, prompts, params, **named):
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, ServingError):
                raise answer
            yield answer
            return
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


def without(error):
    return [PromptVector(0, b"", failure=error.failure())]


@pytest.mark.parametrize(
    ("prompt", "answers", "refused"),
    [
        ([1], [without(TooLarge("of this prompt"))], "of this prompt"),
        ([1], [Unimplemented("no vectors here")], "no vectors here"),
        ([1], [[], Loading("not yet"), without(OutOfBlocks("full")), [PromptVector(0, bytes(4))]], None),
        ([1], [[]] * 3, "3 workers died or were lost"),
        ([1] * 9000, [], "9000 tokens: the largest worker holds fewer"),
    ],
)
async def test_a_prompt_is_sent_again_or_refused(dispatcher, worker, monkeypatch, prompt, answers, refused):
    for name in ("ROUND_S", "FORGIVEN_S", "DECLINED_S"):
        monkeypatch.setattr(vector_dispatcher, name, 0.0)
    worker.answers = list(answers)
    call = asyncio.wait_for(dispatcher.vectors(call_of(), [prompt]), 5)
    if refused is None:
        assert [vector.failure for vector in await call] == [None]
    else:
        with pytest.raises(ServingError, match=refused):
            await call
    assert not worker.answers
    await settled()
    assert not dispatcher._shares and not len(dispatcher._queue)


async def test_without_a_worker_a_call_is_told_so(dispatcher, worker, monkeypatch):
    monkeypatch.setattr(vector_dispatcher, "WITHOUT_WORKERS_S", -1.0)
    monkeypatch.setattr(worker, "views", lambda model: [])
    with pytest.raises(NoWorkers, match="no worker serves m now"):
        await dispatcher.vectors(call_of(), [[1]])


async def test_what_a_worker_without_a_lease_had_is_sent_again(dispatcher, worker):
    waiting = asyncio.create_task(dispatcher.vectors(call_of(), [[1]]))
    await settled()
    assert not dispatcher.num_sent_again
    worker.gone.set()
    await settled()
    assert dispatcher.num_sent_again["m"] == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
