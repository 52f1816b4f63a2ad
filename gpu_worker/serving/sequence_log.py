"""What the journal holds of a sequence that runs here, as far as this worker has been answered; and who is told."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from gpu_worker.scheduling.sequence import Sequence
from gpu_worker.scheduling.step import Delta
from gpu_worker.serving.step_subscription import StepItem, StepSubscription
from octavo.hashing import extend_chain
from octavo.ids import SequenceId
from octavo.sampling import FinishReason


@dataclass(slots=True)
class BranchLog:
    """What the journal holds of a branch."""

    tokens: list[int]
    chain: int
    finish: FinishReason = FinishReason.NONE
    failure: str = ""
    ended: bool = False  # also when it had ended before this worker: then the record knows how
    # Where branches compete: each item as it was told. A stop string may end the branch at any of them, by its score.
    told: list[StepItem] = field(default_factory=list)


class SequenceLog:
    """The logs of a sequence's branches, and the streams that follow them."""

    __slots__ = ("branches", "followers", "gone", "sequence")

    def __init__(
        self, sequence: Sequence, prompt_chain: int, outputs: Seq[Seq[int]], ended_branches: Iterable[int]
    ) -> None:
        self.sequence = sequence
        self.followers: set[StepSubscription] = set()
        self.gone = False
        self.branches = [BranchLog(list(tokens), extend_chain(prompt_chain, tokens)) for tokens in outputs]
        for branch in ended_branches:
            self.branches[branch].ended = True
        if sequence.params.ranked:
            for branch, log in enumerate(self.branches):
                log.told.append(self._item(branch, 0))

    @property
    def seq_id(self) -> SequenceId:
        return self.sequence.seq_id

    @property
    def epoch(self) -> int:
        return self.sequence.epoch

    @property
    def ended(self) -> bool:
        return all(branch.ended for branch in self.branches)

    def _item(self, branch: int, first_index: int) -> StepItem:
        """The log of a branch from there on."""
        log = self.branches[branch]
        first, tokens = min(first_index, len(log.tokens)), tuple(log.tokens[first_index:])
        return StepItem(self.seq_id, self.epoch, branch, first, tokens, log.chain, log.finish, log.failure)

    def items_from(self, next_indexes: Seq[int]) -> list[StepItem]:
        """What a reader misses that is there in each branch; 0 where no index is given."""
        items: list[StepItem] = []
        for branch, log in enumerate(self.branches):
            start = next_indexes[branch] if branch < len(next_indexes) else 0
            if log.told:
                items += [item for item in log.told if item.end > start or item.finish]
            elif start < len(log.tokens) or log.finish:
                items.append(self._item(branch, start))
        return items

    def append(self, delta: Delta) -> StepItem:
        """Records tokens the journal has taken; what followers are told of them."""
        log = self.branches[delta.branch_index]
        new = delta.token_ids[max(0, len(log.tokens) - delta.first_index) :]
        log.tokens.extend(new)
        log.chain = extend_chain(log.chain, new)
        log.finish, log.failure, log.ended = delta.finish, delta.failure, bool(delta.finish)
        item = StepItem(
            self.seq_id,
            self.epoch,
            delta.branch_index,
            delta.first_index,
            delta.token_ids,
            log.chain,
            log.finish,
            log.failure,
            delta.scores,
            delta.prompt_scores,
            delta.cumulative_logprob,
            delta.cached_tokens,
        )
        if log.told:
            log.told.append(item)
        return item

    def failures(self, failure: str) -> list[StepItem]:
        """What followers are told when what runs of it ended in a way the journal does not know."""
        return [
            StepItem(self.seq_id, self.epoch, branch, len(log.tokens), (), log.chain, FinishReason.ERROR, failure)
            for branch, log in enumerate(self.branches)
            if not log.ended
        ]
