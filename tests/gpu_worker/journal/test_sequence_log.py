"""The log of a sequence: what it holds after each item, and what a reader that comes late gets of it."""

from sequences import item_of, new_sequence

from gpu_worker.journal.sequence_log import SequenceLog
from gpu_worker.scheduling.state.sequence import CarriedScores
from octavo.request.errors import RunnerFailed
from octavo.request.hashing import prompt_chain
from octavo.request.sampling import FinishReason, SamplingParams, TokenScore


def scored(*tokens: int) -> tuple[TokenScore, ...]:
    return tuple(TokenScore(token, -0.5 * token) for token in tokens)


def test_the_scores_of_a_branch_are_those_of_all_its_tokens():
    params = SamplingParams(max_tokens=99, seed=1, logprobs=0)
    log = SequenceLog(new_sequence("s", [1], params), prompt_chain([1]), [[]], ())
    assert log.scores_of(0) == []
    log.append_item(item_of(log.sequence, 0, 0, (5, 6), scores=scored(5, 6)))
    log.append_item(item_of(log.sequence, 0, 2, (7,), scores=scored(7)))
    assert log.scores_of(0) == list(scored(5, 6, 7))
    log.append_item(item_of(log.sequence, 0, 3, (8,)))
    assert log.scores_of(0) == [], "not all are known"
    failure = RunnerFailed("the model failed").failure()
    log.append_item(item_of(log.sequence, 0, 4, (), finish=FinishReason.ERROR, failure=failure))
    assert [late.failure for late in log.items_from([4])] == [failure] and log.ended


def test_a_sequence_that_has_moved_brings_its_scores_for_late_readers():
    params = SamplingParams(max_tokens=99, seed=1, logprobs=0, n=1, best_of=2, temperature=1.0)
    sequence = new_sequence("s", [1], params)
    sequence.carried = CarriedScores((-5.5, -3.5), (scored(5, 6), scored(7)))
    log = SequenceLog(sequence, prompt_chain([1]), [[5, 6], [7]], (1,))
    log.append_item(item_of(sequence, 0, 2, (8,), scores=scored(8), cumulative_logprob=-9.5))
    assert log.scores_of(0) == list(scored(5, 6, 8)) and log.scores_of(1) == list(scored(7))
    found = [(item.branch, item.first_index, item.scores, item.cumulative_logprob) for item in log.items_from([])]
    assert found == [(0, 0, scored(5, 6), -5.5), (0, 2, scored(8), -9.5), (1, 0, scored(7), -3.5)]
