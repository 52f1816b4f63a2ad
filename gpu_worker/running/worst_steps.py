"""The steps that take the most memory within a budget, with everything that requests may ask of sampling.

A step's memory depends on how many tokens it has, how many rows of logits, and how long the sequences are; no one step
is the worst in all three. So there are three, and memory for blocks is what the most expensive of them leaves.
"""

from itertools import accumulate, chain

from gpu_worker.steps.step_input import KnownTokens, OpenedSeat, StepInput, TableChange, ints, longs
from octavo.request import limits
from octavo.request.sampling import SamplingParams


def worst_steps(
    max_tokens: int, max_sequences: int, context_tokens: int, block_size: int, vocab_size: int
) -> list[StepInput]:
    """Steps for a runner that has one block: all sequences keep their keys and values there, one over the other.

    They are: prompts of equal length; one prompt as long as possible beside prompts of one token; and decodes at the
    end of the context. All sequences sample, with scores, and each prompt is scored.
    """
    params = costliest_params(vocab_size)
    most = min(max_sequences, max_tokens)
    shapes = [[(0, length) for length in spread(max_tokens, most, context_tokens)]]
    shapes.append([(0, length) for length in pile_up(max_tokens, most, context_tokens)])
    shapes.append([(context_tokens - 1, context_tokens)] * most)
    return [_step(shape, block_size, vocab_size, params) for shape in shapes]


def costliest_params(vocab_size: int) -> SamplingParams:
    """Sampling parameters that need every buffer of a sampler, at its largest."""
    listed = tuple(range(min(limits.MAX_LISTED_TOKEN_IDS, vocab_size)))
    return SamplingParams(
        top_p=0.9,
        top_k=50,
        min_p=0.01,
        best_of=2,  # ranked: the raw log probabilities are kept beside the adjusted ones
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias=dict.fromkeys(listed[: limits.MAX_LOGIT_BIAS], 1.0),
        allowed_token_ids=listed,
        seed=0,
        max_tokens=1,
        logprobs=limits.MAX_LOGPROBS,
        prompt_logprobs=limits.MAX_LOGPROBS,
    )


def spread(max_tokens: int, num_sequences: int, context_tokens: int) -> list[int]:
    """The lengths of `num_sequences` prompts that have `max_tokens` together, or all that the context allows."""
    share, rest = divmod(max_tokens, num_sequences)
    return [min(share + (place < rest), context_tokens) for place in range(num_sequences)]


def pile_up(max_tokens: int, num_sequences: int, context_tokens: int) -> list[int]:
    """The lengths of `num_sequences` prompts that have `max_tokens` together, most of them in as few as possible.

    Each has at least one token, and at most as many as the context.
    """
    lengths, left = [], max_tokens
    for others in range(num_sequences - 1, -1, -1):
        lengths.append(min(left - others, context_tokens))
        left -= lengths[-1]
    return lengths


def _step(shape: list[tuple[int, int]], block_size: int, vocab_size: int, params: SamplingParams) -> StepInput:
    """A step that runs the tokens [start, end) of each of its sequences. Prompts are scored.

    The tokens are as different as possible, so that penalties concern as many as possible.
    """
    spans = [range(start, end) for start, end in shape]
    step = StepInput(0, seats=ints(range(len(spans))), lengths=ints(map(len, spans)), ends=ints(s.stop for s in spans))
    step.positions = longs(chain.from_iterable(spans))
    step.tokens = longs(position % vocab_size for position in step.positions)
    step.slots = longs(position % block_size for position in step.positions)
    for seat, span in enumerate(spans):
        known = longs(position % vocab_size for position in range(span.start))
        step.opened.append(OpenedSeat(seat, params, span.stop, known))
        step.tables.append(TableChange(seat, 0, ints([0] * -(-span.stop // block_size))))
        if len(span) > 1:
            step.scored.append(KnownTokens(seat, 1, longs(position % vocab_size for position in span[1:])))
    step.num_decodes = len(spans) if shape[0][0] else 0
    step.sample_tokens = ints(end - 1 for end in accumulate(step.lengths))
    step.sample_seats, step.sample_branches = step.seats, ints([0] * len(spans))
    return step
