"""How a sequence comes to this worker: what is kept on its branches, if it can ever run here, and its place in line."""

from gpu_worker.scheduling.beam import BeamSearch
from gpu_worker.scheduling.sequence import Branch, Sequence
from gpu_worker.scheduling.step import RunnerInfo
from gpu_worker.scheduling.workload import FINISHED, WAITING, Workload
from octavo.sampling import FinishReason


def prepare(sequence: Sequence, info: RunnerInfo) -> None:
    """Fills in what the scheduler keeps on branches: where they stop, what is to be scored, how they start."""
    params, num_prompt = sequence.params, len(sequence.prompt)
    if not sequence.branches:
        sequence.branches = [
            Branch(sequence, index, list(sequence.prompt), num_prompt) for index in range(params.num_branches)
        ]
    eos = () if params.ignore_eos else info.eos_token_ids
    stops = frozenset((*params.stop_token_ids, *eos))
    room = info.context_tokens - num_prompt
    last = num_prompt + (room if params.max_tokens is None else min(params.max_tokens, room)) - 1
    if params.beam_width:
        sequence.beams = BeamSearch(
            params.beam_width, params.n, params.length_penalty, last + 1 - num_prompt, params.min_tokens, stops
        )
        sequence.beams.starts = [branch.num_journalled_at_start for branch in sequence.branches]
        sequence.beams.done = [branch.state is FINISHED for branch in sequence.branches]
        sequence.branches = [Branch(sequence, 0, list(sequence.prompt), num_prompt)]
        if params.logprobs is not None:
            sequence.branches[0].scores = []
    for branch in sequence.branches:
        branch.stops = stops | {-1}
        branch.last = last
        if params.prompt_logprobs is not None and branch.index == 0 and not branch.num_output and num_prompt > 1:
            branch.num_scored = 1
        elif params.ranked and branch.num_output:
            branch.num_scored = num_prompt
    fresh = all(branch.state is WAITING and not branch.num_output for branch in sequence.branches)
    sequence.fan_out = fresh and len(sequence.branches) > 1


def too_large(sequence: Sequence, work: Workload) -> str:
    """Why the sequence can never run here, with the numbers; empty if it can."""
    info, config, width = work.info, work.config, sequence.params.beam_width
    longest = max(len(branch.tokens) for branch in sequence.branches)
    if len(sequence.prompt) >= info.context_tokens:
        return f"prompt of {len(sequence.prompt)} tokens leaves no room in the context of {info.context_tokens}"
    needed = work.blocks.blocks_for(longest)
    if width:
        needed = longest // info.block_size + width
    if needed > info.num_blocks:
        return f"{longest} tokens need {needed} blocks of {info.block_size} tokens; this worker has {info.num_blocks}"
    if width > config.max_batch_sequences:
        return f"beam_width: {width} is more than the {config.max_batch_sequences} branches a step can hold"
    return ""


def take_in(sequence: Sequence, work: Workload) -> None:
    """Puts it in line. What a replay shows to have ended ends at once."""
    if sequence.fan_out and len(sequence.branches) > work.config.max_batch_sequences:
        sequence.fan_out = False
    work.sequences[sequence.seq_id] = sequence
    if sequence.lonely:
        work.loners.append(sequence)
    for branch in sequence.branches:
        if branch.state is WAITING and (reason := ended_before(branch)):
            work.pending.append(work.delta(branch, (), reason))
            work.finish(branch, reason)
    if sequence.beams is not None and all(sequence.beams.done):
        work.drop(sequence)
    elif sequence.finished:
        work.forget(sequence)
    else:
        work.enqueue(sequence)


def ended_before(branch: Branch) -> FinishReason:
    """Whether a replayed branch had reached its end although its journal does not say so."""
    if not branch.num_output:
        return FinishReason.NONE
    if branch.tokens[-1] in branch.stops and branch.num_output > branch.sequence.params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(branch.tokens) > branch.last else FinishReason.NONE
