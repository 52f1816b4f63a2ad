"""Whole workers in this process whose runners run a model: by themselves, or with the other ranks of a group."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from waiting import until
from worker_pair import PATIENCE_S, QUICK_S, Follower, PairedWorker, WorkerPair

from gpu_worker.steps.runner import Runner, StepOutput
from gpu_worker.steps.step_input import StepInput
from octavo.request.sampling import SamplingParams
from octavo.settings.worker import WorkerSettings
from octavo.store.memory import MemoryState, MemoryStore


class CountedRunner:
    """A runner that counts the tokens of prompts which it computes, and whose steps take longer than they would."""

    mismatches = 0  # which a witness would have noticed

    def __init__(self, runner: Runner) -> None:
        self.step_s = QUICK_S
        self.num_prefill = 0
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, step: StepInput, *further: Callable[[], None]) -> StepOutput:
        self.num_prefill += len(step.tokens) - step.num_decodes
        time.sleep(self.step_s)
        return self._runner.run(step, *further)


class ModelWorker(PairedWorker):
    """One whose runner is there already, and stays when it ends."""

    def __init__(
        self, name: str, store: MemoryStore, runner: Runner, *, warms_up: bool = False, **settings: Any
    ) -> None:
        self.store = store
        self._warms_up = warms_up
        self.runner: Any = CountedRunner(runner)
        own = {"listen": "127.0.0.1:0", "web_listen": "", "worker_id": name, "lease_ms": 20_000, "speculation": "off"}
        self._settings = WorkerSettings(**{**own, **settings})


class ModelWorkers(WorkerPair):
    """Of several of them, `a` and `b` are the first two."""

    def __init__(self, store: MemoryStore, a: Runner, b: Runner, **settings: Any) -> None:
        self.store = store
        self.settings = settings
        self.a = ModelWorker("a", store, a, **settings)
        self.b = ModelWorker("b", store, b, **settings)
        self.others: list[PairedWorker] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._num_sequences = 0

    async def join(self, name: str, runner: Runner, *, warms_up: bool = False, **settings: Any) -> ModelWorker:
        made = ModelWorker(name, self.store, runner, warms_up=warms_up, **{**self.settings, **settings})
        await made.start()
        self.others.append(made)
        await until(self._all_known)
        return made

    async def outputs(self, follower: Follower) -> list[list[int]]:
        """At its end."""
        async with asyncio.timeout(4 * PATIENCE_S):
            await follower.done.wait()
        return follower.outputs()

    async def say(
        self, worker: PairedWorker, prompt: tuple[int, ...], params: SamplingParams, owner: str = ""
    ) -> tuple[list[list[int]], int]:
        """What a worker says, which is told who has the prompt; and how many tokens of it were not computed."""
        before = worker.runner.num_prefill
        hint = (owner, len(prompt) if owner else 0)
        found = await self.outputs(await self.run(params, prompt=prompt, num_tokens=0, on=worker, hint=hint))
        return found, len(prompt) - (worker.runner.num_prefill - before)


@asynccontextmanager
async def model_workers(a: Runner, b: Runner, **settings: Any) -> AsyncIterator[ModelWorkers]:
    """Two workers that know each other. Others may join."""
    store = MemoryStore(MemoryState())
    await store.open()
    workers = ModelWorkers(store, a, b, **settings)
    await workers.a.start()
    await workers.b.start()
    try:
        await until(workers._all_known)
        yield workers
    finally:
        for task in workers.tasks:
            task.cancel()
        await asyncio.gather(*workers.tasks, return_exceptions=True)
        for each in (workers.a, workers.b, *workers.others):
            await each.stop()
