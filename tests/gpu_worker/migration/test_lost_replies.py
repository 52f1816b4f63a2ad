"""Each call of Transfer loses its answer, or comes twice: between two whole workers, and nobody notices."""

import pytest
from effort import diagonal
from prefixes import NUM_BLOCKS, PREFIX, PROMPT, compute, lets_go
from transfer_mishaps import KINDS, Mishap, run_on_at
from waiting import until
from worker_pair import MOVED, STAYED, greedy, worker_pair

from octavo.process import failpoints
from octavo.request.errors import NotFound

PARAMS = greedy(200)
SLOW = {"step_s": 0.01, "block_size": 16}  # few blocks become full while a round takes place, however busy the machine


@pytest.mark.parametrize(("call", "what"), diagonal(["Prepare", "Extend", "Finish", "Abort"], KINDS))
async def test_a_sequence_moves_although_an_answer_is_lost_or_a_call_comes_twice(call, what, monkeypatch):
    mishap, moved = Mishap(monkeypatch, call, what), call != "Abort"
    async with worker_pair(**SLOW) as pair:
        follower = await pair.run(PARAMS)
        run_on_at("source.sent", pair.a.runner, 40)
        if call == "Abort":
            failpoints.arm("source.finishing", "error")
        assert (await pair.a.migrate(follower.seq_id)).outcome == (MOVED if moved else STAYED)
        await until(lambda: mishap.num_calls >= (2 if what == "lost" and call != "Finish" else 1))
        failpoints.disarm_all()
        for refusal in await mishap.come_late():
            assert (isinstance(refusal, NotFound) and call == "Extend") or call == "Prepare", refusal
        await pair.check_owner(follower, PARAMS, moved=moved)


@pytest.mark.parametrize("call", ["Prepare", "Extend", "Finish"])
async def test_where_no_answer_comes_at_all_there_is_one_owner(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mishap, moved = Mishap(monkeypatch, call, "lost", times=100), call == "Finish"
    async with worker_pair(**SLOW) as pair:
        follower = await pair.run(PARAMS)
        run_on_at("source.sent", pair.a.runner, 40)
        last = await pair.a.migrate(follower.seq_id, target=pair.b.incarnation)
        assert (last.outcome, last.failure.reason) == ((MOVED, "") if moved else (STAYED, "UNREACHABLE"))
        assert mishap.num_calls == (1 if moved else 2)
        await pair.check_owner(follower, PARAMS, moved=moved)


@pytest.mark.parametrize("what", KINDS)
async def test_a_fetch_whose_answer_is_lost_or_that_comes_twice(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mishap = Mishap(monkeypatch, "Fetch", what)
    async with worker_pair() as pair:
        await compute(pair, pair.a, PROMPT)
        cached = await compute(pair, pair.b, PROMPT, pair.a.incarnation)
        assert cached == len(PREFIX), "the blocks are there, whatever became of the answer"
        assert (pair.b.worker.fetcher.num_fetched, mishap.num_calls) == (NUM_BLOCKS, 1)
        await mishap.come_late()
        await lets_go(pair)
