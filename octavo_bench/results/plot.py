"""The picture of a run, as PNG: distributions of TTFT and ITL, tokens over time, and each round's throughput."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo_bench.measurement import RoundMeasurement
from octavo_bench.results.summary import summarize
from octavo_bench.rounds import SIDES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#1f6feb", "#d9730d")
INCHES = (11.0, 7.5)
DOTS_PER_INCH = 110
REMEDY = "--png needs matplotlib: pip install 'octavo[bench]'"


def is_available() -> bool:
    """Whether the packages for pictures are installed."""
    try:
        import matplotlib.figure  # noqa: F401  it is only asked for
    except ImportError:
        return False
    return True


def write_png(path: str, labels: Sequence[str], rounds: Sequence[Sequence[RoundMeasurement]]) -> None:
    """Writes the picture. Raises OSError if the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    (ttft, itl), (tokens, throughput) = figure.subplots(2, 2)
    for side, (label, measured) in enumerate(zip(labels, rounds, strict=True)):
        done = [request for each in measured for request in each.requests if request.completed]
        firsts = [request.ttft_s * 1000 for request in done if request.ttft_s is not None]
        gaps = [gap * 1000 for request in done for gap in request.event_gaps]
        name = f"{SIDES[side]}: {label}"
        _draw_shares(ttft, firsts, name, COLORS[side])
        _draw_shares(itl, gaps, name, COLORS[side])
        if measured:
            tokens.plot(*_tokens_over_time(measured[-1]), color=COLORS[side], label=name)
        rates = [summarize([each], None)["output_tokens_per_s"] for each in measured]
        throughput.plot(range(1, len(rates) + 1), rates, "o-", color=COLORS[side], label=name)
    for axes, title, x, y in (
        (ttft, "Time to the first token", "ms", "share of requests"),
        (itl, "Time between two events", "ms", "share of gaps"),
        (tokens, "Output tokens of the last round", "seconds from its beginning", "tokens per second"),
        (throughput, "Throughput", "round", "output tokens per second"),
    ):
        axes.set_title(title, loc="left")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize="small")
    throughput.set_xticks(range(1, max(map(len, rounds), default=0) + 1))
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


def _draw_shares(axes: "Axes", values: list[float], label: str, color: str) -> None:
    """The share of the values up to each value."""
    ordered = sorted(values)
    if ordered:
        shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
        axes.step(ordered, shares, where="post", color=color, label=label)


def _tokens_over_time(measured: RoundMeasurement) -> tuple[list[float], list[float]]:
    """Tokens per second in each of at most 60 stretches of a round, whose events have the same number of tokens."""
    count = max(1, min(60, int(measured.seconds * 2)))
    width = measured.seconds / count
    sums = [0.0] * count
    for request in measured.requests:
        if request.first_at is not None and request.num_events:
            each, now = request.output_tokens / request.num_events, request.first_at
            for gap in (0.0, *request.event_gaps):
                now += gap
                sums[min(count - 1, int((now - measured.began_at) / max(width, 1e-9)))] += each
    return [(place + 0.5) * width for place in range(count)], [amount / max(width, 1e-9) for amount in sums]
