"""Answers whether this worker takes a sequence, prepares its branches, and puts it into the waiting queue."""

from gpu_worker.scheduling.state.beam import BeamSearch
from gpu_worker.scheduling.state.sequence import FINISHED, WAITING, Branch, Hold, Sequence
from gpu_worker.scheduling.state.step import branch_item
from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.steps.runner import BAD_LOGITS, NOTHING_LEFT, RunnerInfo
from octavo.request.errors import OutOfBlocks, TooLarge
from octavo.request.record import AdmissionAnswer, AdmissionOutcome
from octavo.request.sampling import FinishReason


class Admitter:
    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def admit(self, sequence: Sequence) -> AdmissionAnswer:
        """ADMITTED: the sequence waits. NEVER: it can never fit this worker. LATER: the queue is full."""
        work = self._workload
        prepare_branches(sequence, work.info)
        if reason := self._too_large(sequence):
            return AdmissionAnswer(AdmissionOutcome.NEVER, TooLarge(reason).failure())
        if len(work.waiting) >= work.config.max_waiting and sequence.carried is None:  # who has moved cannot go back
            full = OutOfBlocks(f"{len(work.waiting)} sequences are waiting already")
            return AdmissionAnswer(AdmissionOutcome.LATER, full.failure())
        self._put_in_line(sequence)
        return AdmissionAnswer(AdmissionOutcome.ADMITTED)

    def _too_large(self, sequence: Sequence) -> str:
        """Why the sequence can never run here, with the numbers; empty if it can."""
        work, width = self._workload, sequence.params.beam_width
        info, config = work.info, work.config
        longest = max(len(branch.tokens) for branch in sequence.branches)
        if len(sequence.prompt) >= info.context_tokens:
            return f"prompt of {len(sequence.prompt)} tokens leaves no room in the context of {info.context_tokens}"
        needed = work.tables.num_missing(longest, 0, 0)
        if width:  # full blocks that the beams share, and one for each beam
            needed = min(longest // info.block_size, info.window_blocks or longest) + width
        if needed > info.num_blocks:
            return (
                f"{longest} tokens need {needed} blocks of {info.block_size} tokens; this worker has {info.num_blocks}"
            )
        if width > config.max_batch_sequences:
            return f"beam_width: {width} is more than the {config.max_batch_sequences} branches a step can hold"
        return ""

    def _put_in_line(self, sequence: Sequence) -> None:
        """Queues the sequence. A branch that a replay shows to have ended ends at once."""
        work = self._workload
        if len(sequence.branches) > work.config.max_batch_sequences:
            sequence.holds.discard(Hold.FORKS)  # no step holds all its branches, so each starts by itself
        work.add(sequence)
        for branch in sequence.branches:
            reason = reason_to_end(branch) if branch.state is WAITING else FinishReason.NONE
            if reason:
                work.report([branch_item(branch, (), reason)])
                work.finish(branch)
        if sequence.search is not None and all(sequence.search.done):
            work.drop(sequence)


def prepare_branches(sequence: Sequence, info: RunnerInfo) -> None:
    """Sets on a sequence and its branches where they stop, which positions are scored, and how they start."""
    params, num_prompt = sequence.params, len(sequence.prompt)
    eos = () if params.ignore_eos else info.eos_token_ids
    stops = frozenset((*params.stop_token_ids, *eos))
    room = info.context_tokens - num_prompt
    last = num_prompt + (room if params.max_tokens is None else min(params.max_tokens, room)) - 1
    if params.beam_width:
        sequence.search = BeamSearch(
            params.beam_width, params.n, params.length_penalty, last + 1 - num_prompt, params.min_tokens, stops
        )
        sequence.search.starts = [branch.num_journalled_at_start for branch in sequence.branches]
        sequence.search.done = [branch.state is FINISHED for branch in sequence.branches]
        sequence.branches = [Branch(sequence, 0, list(sequence.prompt), num_prompt, text=sequence.beam_text)]
        if params.logprobs is not None:
            sequence.branches[0].scores = []
    for branch in sequence.branches:
        branch.stops = stops | {BAD_LOGITS, NOTHING_LEFT}
        branch.last = last
        if sequence.carried is not None:
            branch.cumulative_logprob = sequence.carried.cumulative_logprobs[branch.index]
            sequence.holds.discard(Hold.UNREPORTED)  # made by the worker that ran it, with the scores of its tokens
            continue
        if branch.state is FINISHED:
            continue
        if params.prompt_logprobs is not None and branch.index == 0 and num_prompt > 1:
            branch.first_unscored = 1
        elif (params.ranked or params.logprobs is not None) and branch.num_output:
            branch.first_unscored = num_prompt
        if sequence.reports_scores:
            branch.num_to_repeat = branch.num_output
    fresh = all(branch.state is WAITING and not branch.num_output for branch in sequence.branches)
    if fresh and len(sequence.branches) > 1:
        sequence.holds.add(Hold.FORKS)


def reason_to_end(branch: Branch) -> FinishReason:
    """Why a replayed branch is at its end although its journal does not say so; NONE if it goes on."""
    if not branch.num_output:
        return FinishReason.NONE
    if branch.tokens[-1] in branch.stops and branch.num_output > branch.sequence.params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(branch.tokens) > branch.last else FinishReason.NONE
