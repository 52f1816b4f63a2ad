"""Starts a group: its memory, its ranks, and the runner of rank 0."""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gpu_worker.group.device_group import load_device_group, refuse_on_devices
from gpu_worker.group.group_runner import GroupRunner
from gpu_worker.group.hosts.host_connection import HostConnection
from gpu_worker.group.hosts.host_streams import HostStreams
from gpu_worker.group.rank_process import RankProcess
from gpu_worker.group.rank_task import RankTask, options_of_ranks
from gpu_worker.group.rank_watch import RankWatch, expect_equal
from gpu_worker.group.shared_memory import memory_of_ranks
from gpu_worker.ops import native
from gpu_worker.running.loading import load_runner
from gpu_worker.running.sizing import cpu_block_bytes
from gpu_worker.steps.runner import ADAPTER_BYTES
from octavo.process.machine import available_bytes
from octavo.request.errors import InvalidArgument

log = logging.getLogger(__name__)
# Times the bytes of adapters: gaps between them may be too short for another one. What none fills is no memory.
GAPS = 8


def load_group(
    model: str,
    *,
    ranks: int,
    patience_s: float,
    stages: int = 1,
    streams: HostStreams | None = None,
    rehearsal: str = "",
    **options: Any,
) -> GroupRunner:
    """A runner whose steps `stages` times `ranks` processes compute together: this one is rank 0.

    They are on this host, or equally many on each of those to which there are `streams`. `options` are those of
    `load_runner`; `threads` are those of each rank. A rank that does not come for `patience_s` within a step ends the
    group. Raises what `load_runner` raises, and RankFailed if another rank cannot start. Where the device is a GPU,
    each rank has one of its own; with a `rehearsal` (see rehearsal_ops) CPUs pretend to be these.
    """
    hosts = streams.place.hosts if streams is not None else 1
    device = options.get("device", "cpu")
    _refuse(ranks, stages, hosts)
    if device != "cpu" or rehearsal:
        refuse_on_devices(ranks, stages, hosts, device, rehearsal)
        return load_device_group(model, ranks=ranks, patience_s=patience_s, rehearsal=rehearsal, **options)
    connections = _connections(streams, stages * ranks // hosts)
    offers = [each.hear_hello() for each in connections]
    if not options.get("kv_cache_bytes"):  # the host with the least memory decides
        options["kv_cache_bytes"] = min([cpu_block_bytes(available_bytes()), *offers])
    of_ranks = options_of_ranks(model, options)
    teams: list[Any] = []  # as a thread sees it that is no rank: it says that the team is broken, and why

    def break_off() -> None:
        for each in teams:
            each.break_off()

    with memory_of_ranks() as memory:
        first = RankTask(
            rank=0,
            size=stages * ranks,
            stages=stages,
            hosts=hosts,
            **memory,
            adapter_bytes=GAPS * (options.get("adapter_bytes") or ADAPTER_BYTES),
            tokens=options["max_batch_tokens"],
            sequences=options["max_batch_sequences"],
            patience_s=patience_s,
            options=of_ranks,
        )
        for each in connections:
            each.tell(replace(first, rank=each.ranks[0], host=each.host))
        here = [RankProcess(replace(first, rank=rank)) for rank in range(1, first.size // hosts)]
        watch = RankWatch([*here, *connections], patience_s, break_off)
        try:
            place = replace(first, links=streams.column_fds() if streams is not None else ()).place()
            runner = load_runner(model, place=place, **options)
            teams.append(place.team())
            expect_equal(runner.info, watch.wait_until_ready())
        except BaseException:
            watch.close()
            if streams is not None:
                streams.close()
            raise
    where = f" on {hosts} hosts" if streams is not None else ""
    log.info("a group of %d ranks%s; pids here %s", first.size, where, [os.getpid(), *watch.pids])
    return GroupRunner(runner, watch, teams[0], streams)


def _refuse(ranks: int, stages: int, hosts: int) -> None:
    asked = "tensor_parallel" if ranks > 1 else "pipeline_parallel"
    if native.load() is None:
        raise InvalidArgument(asked, f"a group needs the extension: {native.rebuild()}, or leave it out")
    if stages % hosts and hosts % stages:
        raise InvalidArgument(
            "pipeline_parallel",
            f"{stages} stages and {hosts} hosts: the one is to be a multiple of the other, so that a host has whole"
            " stages, or a stage whole hosts",
        )
    if ranks * stages % hosts or ranks * stages < hosts:
        raise InvalidArgument(
            "tensor_parallel", f"{ranks * stages} ranks are not equally many on {hosts} hosts: give a multiple"
        )


def _connections(streams: HostStreams | None, ranks_of_host: int) -> Sequence[HostConnection]:
    if streams is None:
        return []
    return [
        HostConnection(host, range(host * ranks_of_host, (host + 1) * ranks_of_host), stream)
        for host, stream in sorted(streams.words.items())
    ]
