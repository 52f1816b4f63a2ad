"""Starts a group whose ranks have a GPU each: its memory, its pipes, its ranks, and the runner of rank 0."""

import logging
import os
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from gpu_worker.group.group_runner import GroupRunner
from gpu_worker.group.rank_process import RankProcess
from gpu_worker.group.rank_task import RankTask, options_of_ranks
from gpu_worker.group.rank_watch import RankFailed, RankWatch, expect_equal
from gpu_worker.group.shared_memory import SharedMemory
from gpu_worker.models.decoders.ranks.device_team import DeviceTeam
from gpu_worker.models.decoders.ranks.place import TeamBroken
from gpu_worker.running.loading import load_runner
from octavo.request.errors import InvalidArgument

log = logging.getLogger(__name__)
FIRST = ("cuda", "cuda:0")  # rank N is on cuda:N


def refuse_on_devices(ranks: int, stages: int, hosts: int, device: str, rehearsal: str) -> None:
    """InvalidArgument for what a group does not do where each rank has a GPU."""
    if stages > 1:
        raise InvalidArgument("pipeline_parallel", "GPUs have no stages: leave it out, or say --device cpu")
    if hosts > 1:
        raise InvalidArgument("launcher", "the GPUs of a group are on one host: leave it out, or say --device cpu")
    if rehearsal:
        return
    if device not in FIRST:
        reason = f"ranks take cuda:0 to cuda:{ranks - 1}, and {device} says otherwise: say cuda, and choose GPUs by"
        raise InvalidArgument("device", f"{reason} CUDA_VISIBLE_DEVICES")
    if (there := torch.cuda.device_count()) < ranks:
        raise InvalidArgument(
            "tensor_parallel", f"{ranks} ranks have a GPU each, and there are {there}: give fewer, or say --device cpu"
        )


def load_device_group(model: str, *, ranks: int, patience_s: float, rehearsal: str = "", **options: Any) -> GroupRunner:
    """A runner whose steps `ranks` processes compute together, each on a device of its own: this one is rank 0."""
    names = ("octavo-team", "octavo-blocks", "octavo-meeting")
    with ExitStack() as while_starting, ExitStack() as on_failure:
        team, blocks, meeting = (while_starting.enter_context(SharedMemory.create(name)) for name in names)
        pipes = []
        for _ in range(ranks - 1):
            pipes.append(os.pipe())
            while_starting.callback(os.close, pipes[-1][0])
            on_failure.callback(os.close, pipes[-1][1])
        first = RankTask(
            rank=0,
            size=ranks,
            meeting=meeting.descriptor,
            rehearsal=rehearsal,
            pipes=[write_end for _, write_end in pipes],
            team=team.descriptor,
            arena=blocks.descriptor,
            tokens=options["max_batch_tokens"],
            sequences=options["max_batch_sequences"],
            patience_s=patience_s,
            options=options_of_ranks(model, options),
        )
        here = [RankProcess(replace(first, rank=rank, pipes=[read_end])) for rank, (read_end, _) in enumerate(pipes, 1)]
        runner = _started(model, first, here, options)
        on_failure.pop_all()
        return runner


def _started(model: str, first: RankTask, here: list[RankProcess], options: dict[str, Any]) -> GroupRunner:
    teams: list[DeviceTeam] = []

    def break_off() -> None:
        for each in teams:
            each.break_off()

    watch = RankWatch(here, first.patience_s, break_off)

    def note(team: DeviceTeam) -> None:
        teams.append(team)
        watch.expect_ready()
        if watch.loss:  # before anybody could have been told
            break_off()

    try:
        runner = load_runner(model, place=first.place(note), **options)
        expect_equal(runner.info, watch.wait_until_ready())
    except BaseException as error:
        loss = watch.loss
        watch.close()
        for each in teams:
            each.close()
        if isinstance(error, TeamBroken):
            raise RankFailed(loss or str(error)) from error
        raise
    log.info("a group of %d devices; pids %s", first.size, [os.getpid(), *watch.pids])
    return GroupRunner(runner, watch, teams[0])
