"""The items by which a worker tells routers of journalled tokens. Their wire form is octavo.internal.v1.StepItem."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import Failure
from octavo.ids import SequenceId
from octavo.sampling import FinishReason, TokenScore


@dataclass(slots=True)
class StepItem:
    """Journalled tokens of one branch of a sequence, and the branch's end if it has ended."""

    seq_id: SequenceId
    epoch: int
    branch: int
    first_index: int  # the index of the first of token_ids in the branch's output
    token_ids: Sequence[int]
    chain: int  # the chain after the last of token_ids
    finish: FinishReason = FinishReason.NONE
    failure: Failure | None = None  # with FinishReason.ERROR
    scores: Sequence[TokenScore] = ()  # one per token, if the request asks for log probabilities
    prompt_scores: Sequence[TokenScore] = ()  # of prompt[1:], in branch 0's first item, if asked for
    cumulative_logprob: float | None = None  # the branch's score up to here, if branches are ranked
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache; in the first item of a sequence
    prefill_ms: int | None = None  # since the first step here with this sequence; with cached_tokens, or not known

    @property
    def end(self) -> int:
        """The index after the last token."""
        return self.first_index + len(self.token_ids)
