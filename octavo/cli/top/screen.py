"""A view of the cluster as lines of a terminal. Whatever a colour says, a word says, too."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from octavo.cli.top.cluster_figures import ClusterFigures
from octavo.cli.top.cluster_reader import ClusterReading
from octavo.v1 import admin_pb2, inference_pb2

MIN_SEQUENCES = 3
MAX_MOVES = 4
ROWS_FOR_MOVES = 12  # with fewer lines, moves are not shown
ALL_ROWS = 20  # where no terminal bounds them
BAR_CELLS = (8, 24)
STATES = {inference_pb2.REQUEST_STATE_QUEUED: "waiting", inference_pb2.REQUEST_STATE_RUNNING: "running"}
MOVES = {
    admin_pb2.MOVE_KIND_MIGRATED: "with its blocks",
    admin_pb2.MOVE_KIND_TAKEN_OVER: "its worker was lost",
    admin_pb2.MOVE_KIND_REPLACED: "given back",
}
TONES = {"available": "green", "draining": "yellow", "unavailable": "yellow", "lost": "red"}
HEAD = "bold"
QUIET = "dim"


def frame_of(
    reading: ClusterReading, figures: ClusterFigures, console: Console, height: int | None = None
) -> RenderableType:
    """One frame, as wide as the console, and no higher than `height` lines."""
    view = reading.view
    top = [_title(reading), *_figures(view, figures), Text()]
    plan = plan_rows(view, None if height is None else height - len(top))
    parts: list[RenderableType] = [*top, *_workers(view.workers, plan.workers, figures, console), _queue(view)]
    if plan.moves:
        parts.append(_moves(view.moves[: plan.moves]))
    return Group(*parts, *_sequences(view, plan.sequences))


class RowPlan(NamedTuple):
    """How many lines each part of a frame has below its headings. The last one may say how many more there are."""

    workers: int
    moves: int
    sequences: int


def plan_rows(view: admin_pb2.WatchClusterResponse, height: int | None) -> RowPlan:
    """Divides so many lines: some sequences are always shown, then come workers, moves, and the other sequences."""
    num_moves, num_sequences = min(MAX_MOVES, len(view.moves)), len(view.sequences)
    if height is None:
        return RowPlan(len(view.workers), num_moves, ALL_ROWS)
    rows = max(2, height - 3)  # two headings, and the queue
    if rows < ROWS_FOR_MOVES or not num_moves:
        num_moves = 0
    else:
        rows -= num_moves + 1
    workers = max(1, rows - min(MIN_SEQUENCES, num_sequences, rows // 2))
    return RowPlan(workers, num_moves, rows - min(workers, len(view.workers)))


def _title(reading: ClusterReading) -> Text:
    view = reading.view
    line = _line("octavo top  ", HEAD)
    line.append(plain(view.router_name or view.router_id), "bold cyan")
    line.append(f"  up {_age(view.up_ms)}  ")
    if reading.trouble:
        line.append(f"LOST {_age(round(1000 * reading.age_s))} ago, trying again: {plain(reading.trouble)}", "red")
    elif view.HasField("failure"):
        line.append(f"NO STORE: {plain(view.failure.message)}", "red")
    else:
        line.append("live", "green")
    return line


def _figures(view: admin_pb2.WatchClusterResponse, figures: ClusterFigures) -> list[Text]:
    running = sum(max(0, w.load.num_sequences - w.load.num_waiting - w.load.num_swapped) for w in view.workers)
    moving = sum(bool(sequence.moving_to) for sequence in view.sequences)
    rate = figures.tokens_per_s
    first = _line()
    for value, what in (
        ("-" if rate is None else f"{rate:,.0f}", "tokens/s"),
        (f"{running:,}", "running"),
        (f"{moving:,}", "moving"),
        (f"{view.queue.num_queued:,}" if view.HasField("queue") else "-", "waiting"),
        (f"{view.num_streams:,}", "streams here"),
    ):
        first.append(value, HEAD)
        first.append(f" {what}   ")
    asked = sum(w.load.prefix_asked_tokens for w in view.workers)
    hits = sum(w.load.prefix_hit_tokens for w in view.workers)
    second = _line()
    for what, quantile in (("TTFT", figures.first_token_s), ("ITL", figures.between_tokens_s)):
        second.append(f"{what} ")
        second.append(f"{_time(quantile(0.5))}", HEAD)
        second.append(f" (95 %: {_time(quantile(0.95))})   ")
    second.append("prefix hits ")
    second.append(_percent(hits, asked), HEAD)
    return [first, second]


def _workers(
    all_workers: Sequence[admin_pb2.WorkerStatus], room: int, figures: ClusterFigures, console: Console
) -> Iterator[RenderableType]:
    workers = all_workers if len(all_workers) <= room else all_workers[: room - 1]
    if workers:
        yield _worker_table(workers, figures, console)
    if len(workers) < len(all_workers):
        yield _line(f"… {len(all_workers) - len(workers)} more workers", QUIET)
    if not all_workers:
        yield _line("no worker has joined yet: octavo worker starts one", QUIET)


def _worker_table(workers: Sequence[admin_pb2.WorkerStatus], figures: ClusterFigures, console: Console) -> Table:
    table = _table(
        "WORKER", "STATE", ">SEQ", ">WAIT", "BLOCKS", ">USED", ">STEP", ">PLAN/RUN/COMMIT", ">TOK/S", ">HITS"
    )
    names = max(len(plain(worker.worker_id)) for worker in workers)
    cells = max(BAR_CELLS[0], min(BAR_CELLS[1], console.width - names - 66))
    for worker in workers:
        load, state, steps = worker.load, state_of(worker), figures.steps_of(worker.incarnation)
        parts = (steps.plan_s, steps.run_s, steps.commit_s)
        split = "/".join(f"{100 * part / steps.total_s:.0f}" for part in parts) if steps.total_s else "-"
        table.add_row(
            plain(worker.worker_id),
            Text(state, TONES[state]),
            f"{load.num_sequences:,}",
            f"{load.num_waiting + load.num_swapped:,}",
            _bar(load, worker.num_blocks, cells, console),
            _percent(load.num_used_blocks, worker.num_blocks),
            f"{load.step_ms:.1f}ms" if load.step_ms < 9.95 else f"{load.step_ms:.0f}ms",
            split,
            f"{steps.num_tokens:,}",
            _percent(load.prefix_hit_tokens, load.prefix_asked_tokens),
        )
    return table


def state_of(worker: admin_pb2.WorkerStatus) -> str:
    if worker.reason == "lost":
        return "lost"
    if worker.load.draining:
        return "draining"
    return "available" if worker.available else "unavailable"


def _bar(load: admin_pb2.WorkerLoad, num_blocks: int, cells: int, console: Console) -> Text:
    """Used, cached and free blocks. Without UTF-8: # and + and dots."""
    signs = "█▒·" if console.encoding.lower().startswith("utf") else "#+."
    bar, end, total = Text(), 0, 0
    for count, sign, tone in ((load.num_used_blocks, signs[0], "blue"), (load.num_cached_blocks, signs[1], "cyan")):
        total += count
        upto = min(cells, max(end + (count > 0), round(cells * total / max(1, num_blocks))))
        bar.append(sign * (upto - end), tone)
        end = upto
    bar.append(signs[2] * (cells - end), QUIET)
    return bar


def _queue(view: admin_pb2.WatchClusterResponse) -> Text:
    queue, line = view.queue, _line("QUEUE ", QUIET)
    tenants = [
        f"{plain(t.tenant) or '(no tenant)'} {t.num_queued:,} ({t.queued_tokens:,} tokens)" for t in queue.tenants
    ]
    if not view.HasField("queue"):
        return line.append("not known: the store does not answer")
    return line.append(", ".join(tenants) or "nothing waits")


def _moves(moves: Sequence[admin_pb2.SequenceMove]) -> Table:
    table = _table("MOVED", "FROM", "TO", "HOW", ">AGO")
    for move in moves:
        names = (move.request_id, move.from_worker, move.to_worker)
        how = ": ".join(filter(None, [MOVES.get(move.kind, ""), move.seen]))
        table.add_row(*map(plain, names), plain(how), _age(move.age_ms))
    return table


def _sequences(view: admin_pb2.WatchClusterResponse, room: int) -> Iterator[RenderableType]:
    has_more = len(view.sequences) > room or view.has_more_sequences
    sequences = view.sequences[: max(0, room - 1)] if has_more else view.sequences
    num_more = len(view.sequences) - len(sequences)
    if sequences:
        yield _sequence_table(sequences, view)
    if not view.sequences:
        yield _line("no sequence runs or waits", QUIET)
    elif has_more:
        yield _line(f"… {num_more} more{', and those that no view names' if view.has_more_sequences else ''}", QUIET)


def _sequence_table(sequences: Sequence[admin_pb2.SequenceStatus], view: admin_pb2.WatchClusterResponse) -> Table:
    names = {worker.incarnation: worker.worker_id for worker in view.workers}
    table = _table("SEQUENCE", "TENANT", "STATE", "WORKER", ">PROMPT", ">OUTPUT", ">AGE")
    for each in sequences:
        owner, target = (names.get(worker, worker) for worker in (each.owner, each.moving_to))
        table.add_row(
            plain(each.request_id),
            plain(each.tenant) or "-",
            "moving" if target else STATES.get(each.state, "-"),
            plain(f"{owner} > {target}" if target else owner or "-"),
            f"{each.prompt_tokens:,}",
            f"{sum(each.num_tokens):,}",
            _age(each.age_ms),
        )
    return table


def _table(*heads: str) -> Table:
    """A table without lines between cells. A heading with > is that of numbers."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style=QUIET, expand=False)
    for head in heads:
        numeric = head.startswith(">")
        table.add_column(
            head.removeprefix(">"), justify="right" if numeric else "left", no_wrap=True, overflow="ellipsis"
        )
    return table


def _line(text: str = "", style: str = "") -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    return line.append(text, style) if text else line


def plain(text: str) -> str:
    """A text from outside, without the control characters that a terminal would obey."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 0.0095:
        return f"{1000 * seconds:.1f} ms"
    return f"{1000 * seconds:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"


def _age(ms: int) -> str:
    seconds = ms // 1000
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min"
    return f"{seconds // 3600} h" if seconds < 172_800 else f"{seconds // 86_400} d"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"
