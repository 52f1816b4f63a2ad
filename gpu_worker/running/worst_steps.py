"""The steps that take the most memory within a budget, with everything that requests may ask of sampling.

A step's memory depends on how many tokens it has, how many rows of logits, and how long the sequences are; no one step
is the worst in all three. So there are three, and memory for blocks is what the most expensive of them leaves.
"""

from gpu_worker.scheduling.state.sequence import Branch, Sequence
from gpu_worker.scheduling.state.step import Chunk, StepPlan
from octavo.request import limits
from octavo.request.ids import BlockId, SequenceId
from octavo.request.sampling import SamplingParams


def worst_steps(
    max_tokens: int, max_sequences: int, context_tokens: int, block_size: int, vocab_size: int
) -> list[StepPlan]:
    """Plans for a runner that has one block: all sequences keep their keys and values there, one over the other.

    They are: prompts of equal length; one prompt as long as possible beside prompts of one token; and decodes at the
    end of the context. All sequences sample, with scores, and each prompt is scored.
    """
    params = costliest_params(vocab_size)
    most = min(max_sequences, max_tokens)
    plans = []
    for lengths in (spread(max_tokens, most, context_tokens), pile_up(max_tokens, most, context_tokens)):
        chunks = [_prompt(length, block_size, vocab_size, params) for length in lengths]
        plans.append(_plan(chunks, num_decodes=0))
    decodes = [_decode(context_tokens, block_size, vocab_size, params) for _ in range(most)]
    plans.append(_plan(decodes, num_decodes=len(decodes)))
    return plans


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


def _plan(chunks: list[Chunk], num_decodes: int) -> StepPlan:
    num_tokens = sum(chunk.length for chunk in chunks)
    return StepPlan(0, chunks, num_tokens=num_tokens, num_branches=len(chunks), num_decodes=num_decodes)


def _prompt(length: int, block_size: int, vocab_size: int, params: SamplingParams) -> Chunk:
    branch = _branch(length, block_size, vocab_size, params)
    return Chunk(branch, 0, length, (branch,), score_from=1 if length > 1 else -1)


def _decode(context_tokens: int, block_size: int, vocab_size: int, params: SamplingParams) -> Chunk:
    branch = _branch(context_tokens, block_size, vocab_size, params)
    return Chunk(branch, context_tokens - 1, 1, (branch,))


def _branch(num_tokens: int, block_size: int, vocab_size: int, params: SamplingParams) -> Branch:
    """A branch whose tokens are as different as possible, so that penalties concern as many as possible."""
    tokens = [place % vocab_size for place in range(num_tokens)]
    sequence = Sequence(SequenceId("0" * 32), 1, tokens, params, bytes(32))
    branch = Branch(sequence, 0, tokens, num_tokens, blocks=[BlockId(0)] * (-(-num_tokens // block_size)))
    sequence.branches.append(branch)
    return branch
