"""`octavo bench`: sends load to octavo by gRPC, or to any server with OpenAI's interface, and measures it.

    octavo bench --concurrency 32 --prompt-tokens 256 --output-tokens 128
    octavo bench http://127.0.0.1:8000 --rate 5 --slo ttft=500ms,itl=50ms
    octavo bench --against http://127.0.0.1:8000 --rounds 7 --png comparison.png
Ctrl-C ends it with the results so far. docs/benchmarking.md says how to measure well.
"""

import argparse
import asyncio
import json
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from octavo.cli import output
from octavo.process.loop import run as run_loop
from octavo_bench import arguments, run_parts
from octavo_bench.measurement import RequestMeasurement
from octavo_bench.results import plot, report
from octavo_bench.rounds import SIDES, Benchmark
from octavo_bench.token_counter import TokenCounter, load_counter

if TYPE_CHECKING:
    from rich.progress import Progress

INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "bench", help="measure an endpoint, or compare two", usage="%(prog)s [URL] [FLAG ...]", description=__doc__
    )
    arguments.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    arguments.require_consistent(args)
    if args.png and not plot.is_available():
        output.print_error(args.command, f"{plot.REMEDY}; going on without a picture")
        args.png = None
    counter = load_counter(args.tokenizer) if args.tokenizer else None
    return run_loop(_BenchProcess(args, counter).run())


class _BenchProcess:
    """One call of the command, from its flags to its exit code."""

    def __init__(self, args: argparse.Namespace, counter: TokenCounter | None) -> None:
        self._args = args
        self._counter = counter
        self._stop = asyncio.Event()
        self._settings = run_parts.settings_of(args)
        self._endpoints = run_parts.endpoints_of(args)

    async def run(self) -> int:
        try:
            for endpoint in self._endpoints:
                await endpoint.open(self._args.timeout)
            return await self._measure()
        finally:
            for endpoint in self._endpoints:
                await endpoint.close()

    async def _measure(self) -> int:
        args, settings = self._args, self._settings
        traffic = run_parts.traffic_of(args, settings, self._counter, self._endpoints)
        per_round = settings.num_conversations and settings.num_conversations * (args.turns or 1)
        benchmark = Benchmark(self._endpoints, traffic, settings, self._counter)
        started_at = datetime.now(UTC)
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._note_signal)
        try:
            with BenchProgressBar(len(self._endpoints), per_round and per_round * settings.rounds) as bar:
                benchmark.on_end = bar.advance
                await benchmark.run(self._stop)
        finally:
            self._forget_signals()
        result = report.result_of(
            self._endpoints,
            benchmark.rounds,
            run_parts.described(args, settings, per_round),
            args.slo,
            interrupted=self._stop.is_set(),
            started_at=started_at,
        )
        self._deliver(result, benchmark)
        return self._exit_code(result)

    def _note_signal(self) -> None:
        """Ends the rounds. A second signal ends the program at once."""
        self._stop.set()
        self._forget_signals()

    def _forget_signals(self) -> None:
        for number in SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _deliver(self, result: dict[str, Any], benchmark: Benchmark) -> None:
        """Writes the files and prints the result: a full disk, or nobody who reads stdout, loses only one of them."""
        args = self._args
        try:
            if args.save:
                Path(args.save).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            if args.png:
                plot.write_png(args.png, [endpoint.url for endpoint in self._endpoints], benchmark.rounds)
        finally:
            if args.json:
                output.print_json(result)
            else:
                print(report.rendered(result), flush=True)

    def _exit_code(self, result: dict[str, Any]) -> int:
        if self._stop.is_set():
            return INTERRUPTED
        for endpoint in result["endpoints"]:
            total = endpoint["total"]
            if not total["completed"]:
                reason, failure = next(iter(total["failures"].items()), ("no request was sent", {"example": ""}))
                text = f"{endpoint['url']}: no request completed: {reason}: {failure['example']}"
                output.print_error(self._args.command, text.rstrip(": "))
                return 1
        return 0


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
        self._failed[side] += request.has_failed
        self._progress.update(self._tasks[side], advance=1, tokens=self._tokens[side], failed=self._failed[side])

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
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
