"""Vectors of prompts through a scheduler and a runner, beside whatever else runs there."""

from array import array
from collections.abc import Sequence

from scheduler_parts import SchedulerParts

from gpu_worker.pooling.pooled_sequences import pooled_sequence
from gpu_worker.pooling.vectors import vector_of
from gpu_worker.scheduling.state.pooling import PoolingEnd
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.scheduling.state.sequence import Sequence as ScheduledSequence
from gpu_worker.steps.runner import Runner
from octavo.pooling.params import PoolingParams


def vectors(
    runner: Runner,
    asked: Sequence[tuple[Sequence[int], PoolingParams]],
    others: Sequence[ScheduledSequence] = (),
    **config: object,
) -> list["array[float]"]:
    """The vector of each prompt. All of them, and `others`, are admitted before the first step."""
    options = {"max_batch_tokens": 64, "max_batch_sequences": 64, "debug": True, **config}
    scheduler = SchedulerParts(SchedulerConfig(**options), runner.info).scheduler  # type: ignore[arg-type]
    ends: dict[int, PoolingEnd] = {}
    for number, (prompt, params) in enumerate(asked):
        sequence = pooled_sequence(prompt, params, runner.info, lambda end, number=number: ends.update({number: end}))
        assert scheduler.admit(sequence).admitted
    for other in others:
        assert scheduler.admit(other).admitted
    while len(ends) < len(asked):
        plan = scheduler.plan()
        assert scheduler.commit(plan, runner.run(plan.input)).items or plan.chunks or plan.input.swap_in
    return [vector_of(ends[number], params, len(prompt)) for number, (prompt, params) in enumerate(asked)]
