"""Prompts that begin alike, on the workers of a pair."""

from waiting import until
from worker_pair import PairedWorker, WorkerPair, greedy

SIZE = 4
NUM_BLOCKS = 12
PREFIX = tuple(range(1, 1 + NUM_BLOCKS * SIZE))
PROMPT = (*PREFIX, 60, 61, 62)
PARAMS = greedy(20)


async def compute(pair: WorkerPair, worker: PairedWorker, prompt: tuple[int, ...], owner: str = "") -> int:
    """Runs a sequence to its end on a worker, which is told who has the prefix. Its tokens are right.

    Returns how many tokens of the prompt were not computed, if nothing else runs there.
    """
    before = worker.runner.num_prefill
    follower = await pair.run(PARAMS, prompt=prompt, on=worker, hint=(owner, len(PREFIX) if owner else 0))
    await pair.check_end(follower, PARAMS, prompt=prompt)
    await fetches_nothing(worker)
    return len(prompt) - (worker.runner.num_prefill - before)


async def fetches_nothing(worker: PairedWorker) -> None:
    """Waits until what has come was counted: the sequence that waits for blocks does not wait for that."""
    fetcher = worker.worker.fetcher
    await until(lambda: fetcher is None or not fetcher._coming)


async def lets_go(pair: WorkerPair) -> None:
    for worker in pair.workers.values():
        await worker.has_let_go()
        await fetches_nothing(worker)
