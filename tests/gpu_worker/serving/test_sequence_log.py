"""The log of a sequence: what it holds after each delta, and what a reader that comes late gets of it."""

from sequences import new_sequence

from gpu_worker.scheduling.step import Delta
from gpu_worker.serving.sequence_log import SequenceLog
from octavo.errors import HistoryLost, RunnerFailed
from octavo.hashing import extend_chain, prompt_chain
from octavo.sampling import FinishReason, SamplingParams


def new_log(outputs: list[list[int]], ended: tuple[int, ...] = ()) -> SequenceLog:
    params = SamplingParams(n=len(outputs), max_tokens=99, seed=1)
    sequence = new_sequence("s", [1], params)
    return SequenceLog(sequence, prompt_chain([1]), outputs, ended)


def test_tokens_that_are_in_the_log_are_not_appended_twice():
    log = new_log([[5, 6]])
    log.append_delta(Delta(log.sequence, 0, 1, (6, 7)))
    assert log.branches[0].tokens == [5, 6, 7]
    assert log.branches[0].chain == extend_chain(prompt_chain([1]), [5, 6, 7])


def test_a_failed_branch_gives_its_failure_to_every_reader():
    log = new_log([[]])
    failure = RunnerFailed("the model failed").failure()
    item = log.append_delta(Delta(log.sequence, 0, 0, (), FinishReason.ERROR, failure.to_json()))
    assert item.failure == failure
    assert [late.failure for late in log.items_from([0])] == [failure]
    assert log.ended


def test_a_failure_outside_the_journal_ends_only_branches_that_run():
    log = new_log([[5], [6]], ended=(0,))
    failure = HistoryLost("lost").failure()
    (item,) = log.failure_items(failure)
    assert (item.branch, item.first_index, item.finish, item.failure) == (1, 1, FinishReason.ERROR, failure)


def test_a_late_reader_gets_what_it_misses_of_each_branch():
    log = new_log([[5, 6], [7], [8, 9]])
    items = log.items_from([1, 1])
    assert [(item.branch, item.first_index, list(item.token_ids)) for item in items] == [(0, 1, [6]), (2, 0, [8, 9])]
