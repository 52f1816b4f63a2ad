"""What a reader of the figures has to know before believing them.

The generator, not the endpoint, may have been the limit; two figures may not mean the same.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from octavo_bench.measurement import RoundMeasurement

MAX_CPU_SHARE = 0.85  # of one core: a Python program cannot use more than one
MIN_LATENESS_MS = 5.0
MAX_LATENESS_SHARE = 0.1  # of the median TTFT
MAX_LAG_SHARE = 0.5  # of the median ITL
MIN_LAG_MS = 5.0
MAX_TOKENS_PER_EVENT = 1.05
MAX_LENGTH_ERROR = 0.1
FEW_TOKENS = 4  # that a server may put before or around every prompt
FEW_ROUNDS = 5


def of_endpoint(name: str, total: dict[str, Any], rounds: Sequence[RoundMeasurement], open_loop: bool) -> Iterator[str]:
    """Sentences about one endpoint's figures."""
    generator = total["generator"]
    if generator["cpu_share"] > MAX_CPU_SHARE:
        yield (
            f"{name}: the generator used {generator['cpu_share']:.0%} of a core, so it may have been the bottleneck: "
            "send less, or run several generators"
        )
    late, ttft = generator["lateness_ms"], total["ttft_ms"]
    if late and ttft and late["p99"] > max(MIN_LATENESS_MS, MAX_LATENESS_SHARE * ttft["p50"]):
        yield (
            f"{name}: the generator sent requests late (p99 {late['p99']:.1f} ms), which TTFT includes: "
            "send less, or give it a core of its own"
        )
    lag, itl = generator["loop_lag_ms"], total["itl_ms"]
    if lag and itl and lag["p99"] > max(MIN_LAG_MS, MAX_LAG_SHARE * itl["p50"]):
        yield (
            f"{name}: the generator's event loop was late (p99 {lag['p99']:.1f} ms), which TTFT and ITL include: "
            "send less, or give it a core of its own"
        )
    if total["failed"]:
        yield f"{name}: {total['failed']} of {total['requests']} requests failed, whose latencies are in no percentile"
    if "events" in total["counted_by"]:
        yield f"{name}: the endpoint does not count tokens, so each event counts as one: give --tokenizer"
    elif (total["tokens_per_event"] or 1.0) > MAX_TOKENS_PER_EVENT:
        yield (
            f"{name}: an event has {total['tokens_per_event']:.2f} tokens on average: ITL is the time between two "
            "events, TPOT is the time per token"
        )
    if total["short_answers"]:
        yield f"{name}: {total['short_answers']} answers have fewer tokens than were asked for"
    if open_loop and any(_is_behind(each) for each in rounds):
        yield f"{name}: the endpoint did not keep up with the rate, so latencies grow with the length of a round"


def of_prompts(name: str, total: dict[str, Any], wanted_mean: float, has_tokenizer: bool) -> Iterator[str]:
    """Whether synthetic prompts have the length that was asked for."""
    mean = total["mean_prompt_tokens"]
    if mean and abs(mean - wanted_mean) > max(MAX_LENGTH_ERROR * wanted_mean, FEW_TOKENS):
        remedy = "; --tokenizer makes them exact" if not has_tokenizer else "; a chat template adds tokens"
        yield f"{name}: prompts have {mean:.0f} tokens on average, not {wanted_mean:.0f}{remedy}"


def of_pair(totals: Sequence[dict[str, Any]], num_rounds: int) -> Iterator[str]:
    """Whether the figures of two endpoints can be compared."""
    if num_rounds < FEW_ROUNDS:
        yield f"{num_rounds} round(s) of both endpoints say little about the spread: --rounds {FEW_ROUNDS} or more"
    for figure, text in (("mean_output_tokens", "answers"), ("mean_prompt_tokens", "prompts")):
        first, second = (total[figure] for total in totals)
        if first and second and abs(first / second - 1) > 0.01:
            yield f"the {text} of A and B have different lengths ({first:.1f} and {second:.1f} tokens on average)"
    first, second = (total["tokens_per_event"] for total in totals)
    if first and second and max(first / second, second / first) > MAX_TOKENS_PER_EVENT:
        yield "A and B put different numbers of tokens into an event: compare TPOT, not ITL"


def _is_behind(measured: RoundMeasurement) -> bool:
    """Whether answering what had arrived took longer than all arrivals."""
    if measured.cut or len(measured.requests) < 2:
        return False
    last = max(request.intended_at for request in measured.requests)
    return measured.ended_at - last > last - measured.began_at
