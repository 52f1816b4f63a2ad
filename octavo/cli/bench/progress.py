"""The progress bar of a run, on stderr. There is none without a terminal."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from octavo.cli.bench.benchmark import SIDES
from octavo.cli.bench.measurement import INTERRUPTED, RequestMeasurement

if TYPE_CHECKING:
    from rich.progress import Progress


class BenchProgressBar:
    """Counts requests, tokens and failures of each endpoint. Without a terminal, or without rich, it shows nothing."""

    def __init__(self, num_endpoints: int, num_requests: int | None) -> None:
        """`num_requests`: of each endpoint; None if only time limits a run."""
        self._progress = _progress() if sys.stderr.isatty() else None
        self._tokens = [0] * num_endpoints
        self._failed = [0] * num_endpoints
        self._tasks = [
            self._progress.add_task(SIDES[side], total=num_requests, tokens=0, failed=0)
            for side in range(num_endpoints)
            if self._progress is not None
        ]

    def advance(self, side: int, request: RequestMeasurement) -> None:
        if self._progress is None:
            return
        self._tokens[side] += request.num_events
        self._failed[side] += request.reason not in ("", INTERRUPTED)
        self._progress.update(self._tasks[side], advance=1, tokens=self._tokens[side], failed=self._failed[side])

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


def _progress() -> "Progress | None":
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} events, {task.fields[failed]} failed"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        refresh_per_second=4,
        transient=True,
    )
