"""A scheduler to be tested step by step."""

from typing import Any

from scheduler_parts import SchedulerParts
from sequences import new_sequence

from gpu_worker.drafting.draft_model import DraftModel
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.scheduling.state.sequence import Sequence
from gpu_worker.scheduling.state.step import StepItems, StepPlan
from gpu_worker.steps.runner import Runner
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.errors import Failure
from octavo.request.sampling import FinishReason, SamplingParams

FAILURE = Failure(13, "TEST", "the runner failed", False)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class Bench(SchedulerParts):
    """A scheduler, a FakeRunner unless another runner is given, and a clock that moves when told."""

    def __init__(self, *, runner: dict | Runner | None = None, draft_model: DraftModel | None = None, **config) -> None:
        if runner is None or isinstance(runner, dict):
            runner = FakeRunner(**{"block_size": 4, "num_blocks": 64, "num_host_blocks": 16, **(runner or {})})
        self.runner: Any = runner
        self.now = 0.0
        config = {"max_batch_tokens": 32, "max_batch_sequences": 16, "watermark": 0.0, "debug": True, **config}
        super().__init__(SchedulerConfig(**config), self.runner.info, lambda: self.now, draft_model)
        self.tokens: dict[str, list[int]] = {}
        self.finishes: dict[str, FinishReason] = {}

    def new(self, name: str, prompt: int | list[int] = 5, params: SamplingParams = GREEDY, **more) -> Sequence:
        start = sum(map(ord, name))  # so that no two share a prefix
        tokens = [1 + (start + index * index) % 97 for index in range(prompt)] if isinstance(prompt, int) else prompt
        if (encoder := self.runner.info.encoder).exists:  # blocks are those of the whole prompt
            more = {"root": encoder.salt_of("", tokens).encode(), **more}
        return new_sequence(name, tokens, params, now=self.now, **more)

    def admit(self, name: str, prompt: int | list[int] = 5, params: SamplingParams = GREEDY, **more) -> Sequence:
        sequence = self.new(name, prompt, params, **more)
        answer = self.scheduler.admit(sequence)
        assert answer.admitted, answer
        return sequence

    def cancel(self, name: str) -> bool:
        return self.scheduler.cancel(self.sequence(name))

    def drop(self, name: str) -> None:
        self.scheduler.drop(self.sequence(name))

    def step(self) -> tuple[StepPlan, StepItems]:
        plan = self.scheduler.plan()
        lengths = {c.branch.sequence.seq_id: c.length for c in plan.chunks}
        result = self.scheduler.commit(plan, self.runner.run(plan.input))
        self.lengths = lengths
        for item in result.items:
            name = f"{item.seq_id}.{item.branch}"
            self.tokens.setdefault(name, []).extend(item.token_ids)
            if item.finish:
                assert name not in self.finishes
                self.finishes[name] = item.finish
        return plan, result

    def finish(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps: {self.load()}")
