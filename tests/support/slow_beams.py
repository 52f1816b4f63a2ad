"""Beam search over a FakeRunner's model, without a shortcut: every text is looked at as a whole, again and again."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from gpu_worker.steps.runner import RunnerInfo
from gpu_worker.testing.fake_runner import Chooser, fold
from octavo.request.sampling import FinishReason, SamplingParams


class BestOutput(NamedTuple):
    """One of the n best outputs."""

    token_ids: tuple[int, ...]
    text: str  # cut before its stop string
    finish: FinishReason
    total: float


def best_outputs(
    info: RunnerInfo,
    prompt: Sequence[int],
    params: SamplingParams,
    state_of: Callable[[Sequence[int]], int] = fold,
    ends: Collection[int] = (),
    chooser: Chooser | None = None,
) -> list[BestOutput]:
    """The outputs of a search that these tokens end, the best first. `state_of` is the model's."""
    chooser, width = chooser or Chooser(info), params.beam_width
    limit = min(params.max_tokens or 0, info.context_tokens - len(prompt))
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    complete: list[tuple[float, BestOutput]] = []
    for length in range(1, limit + 1):
        offers = [
            (-(total + logprob), parent, token)
            for parent, (output, total) in enumerate(live)
            for token, logprob in chooser.top(state_of([*prompt, *output]), 2 * width)
        ]
        going = []
        for place, (cost, parent, token) in enumerate(sorted(offers)):
            output = (*live[parent][0], token)
            stop = stop_of(output, params, ends)
            if stop or (token in ends and length > params.min_tokens):
                if place < width:
                    shown = text_of(output) if params.include_stop else text_of(output).removesuffix(stop)
                    best = BestOutput(output, shown, FinishReason.STOP, -cost)
                    complete.append((-cost / length**params.length_penalty, best))
            elif len(going) < width:
                going.append((output, -cost))
        live = going
    for output, total in live:
        best = BestOutput(output, text_of(output), FinishReason.LENGTH, total)
        complete.append((total / limit**params.length_penalty, best))
    complete.sort(key=lambda found: -found[0])
    return [best for _, best in complete[: params.n]]


def stop_of(output: Sequence[int], params: SamplingParams, ends: Collection[int] = ()) -> str:
    """The longest stop string that the last token completes. Tokens that end outputs have no text, or it is shown."""
    hidden = () if params.include_stop else ends
    text = text_of([token for token in output if token not in hidden])
    if output[-1] in hidden or output[-1] >= 128 or len(output) < params.min_tokens:
        return ""
    return max((stop for stop in params.stop if text.endswith(stop)), key=len, default="")


def text_of(output: Sequence[int]) -> str:
    """The text of tokens that are bytes of ASCII, or no text at all."""
    return bytes(token for token in output if token < 128).decode()
