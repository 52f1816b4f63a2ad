"""The checker of storms finds what it is there to find: each broken promise in a log that is otherwise right."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from live.oracle import Oracle
from storm.log_checker import FaultTime, LogChecker, Verdict, check_folder
from storm.reference import FILE
from storm.stream_log import StreamLine, params_of

from octavo.client import SamplingParams

PROMPT, PARAMS = [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=6)
STOP, LENGTH, CANCELLED = 1, 2, 3
Change = Callable[[StreamLine], object]


def line_of(params: SamplingParams, events: list[list[object]], text: str, **record: object) -> StreamLine:
    record = {"state": "DONE", "lengths": [6], "finishes": [LENGTH], "output_tokens": 6, "epoch": 2, **record}
    return StreamLine(1, "a", "own", 100.0, PROMPT, params_of(params), 104.0, events, {"0": text}, "", "", record)


def right_line() -> StreamLine:
    """A stream that was attached a second time, and began there at an index that had been delivered."""
    output = Oracle("witness").outputs(PROMPT, PARAMS)[0]
    tokens = list(output.token_ids)
    events = [
        [0.1, 1, 0, 0, tokens[:2], 2, 0, 0],
        [0.2, 1, 0, 2, tokens[2:4], 2, 0, 0],
        [3.0, 2, 0, 2, tokens[2:4], 0, 0, 0],
        [3.1, 2, 0, 4, tokens[4:], 2, LENGTH, 1],
    ]
    return line_of(PARAMS, events, output.text, timeline=[])


def verdict(line: StreamLine, *faults: FaultTime) -> Verdict:
    return LogChecker(faults).check_all([line])


def test_a_right_log_has_no_violation() -> None:
    found = verdict(right_line(), FaultTime("router-kill", 100.5, 102.0))
    assert not found.violations
    assert (found.tokens, found.reattaches, found.ends) == (6, 1, {"own end": 1})
    assert found.gaps_s == {"router-kill": [pytest.approx(2.8)]}


def event(index: int, position: int, value: object) -> Change:
    return lambda line: line.events[index].__setitem__(position, value)


def record(**fields: object) -> Change:
    return lambda line: line.record.update(fields)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (event(1, 4, [7, 8]), "other tokens"),
        (event(1, 3, 3), "index 3 where 2 is due"),
        (event(2, 3, 5), "a gap before index 5"),
        (event(2, 5, 2), "passed on twice"),
        (event(3, 5, 1), "passed on twice"),
        (event(3, 7, 0), "no terminal event"),
        (event(2, 7, 1), "an event after the terminal one"),
        (event(1, 7, 1), "2 terminal events"),
        (event(3, 6, STOP), "ended otherwise"),
        (event(3, 6, CANCELLED), "ended with CANCELLED"),
        (lambda line: line.events.pop(1), "a gap"),
        (lambda line: line.texts.update({"0": "x"}), "another text"),
        (record(lengths=[7]), "journal 7, delivered 6"),
        (record(output_tokens=5), "usage 5, delivered 6"),
        (record(state="CANCELLED"), "the record says CANCELLED"),
        (record(error="NOT_FOUND"), "the record is gone"),
        (lambda line: setattr(line, "error", "POISON_SUSPECTED"), "ended with POISON_SUSPECTED"),
        (lambda line: setattr(line, "error", "HISTORY_LOST"), "ended with HISTORY_LOST"),
    ],
)
def test_a_broken_promise_is_found(change: Change, what: str) -> None:
    line = right_line()
    change(line)
    found = verdict(line).violations
    assert any(what in violation for violation in found), found


def test_lost_data_are_allowed_only_where_data_were_lost() -> None:
    line = replace(right_line(), error="HISTORY_LOST", events=right_line().events[:2])
    assert verdict(replace(line)).violations
    assert verdict(replace(line), FaultTime("promotion-lossy", 90.0, 95.0)).violations
    found = verdict(line, FaultTime("promotion-lossy", 101.0, 102.0))
    assert (found.violations, found.data_loss, len(found.ended_otherwise)) == ([], 1, 1)


@pytest.mark.parametrize(
    ("tokens", "text", "stop", "what"),
    [
        ([104, 105, 33, 33, 256], "hi!!", (), ""),
        ([104, 105, 33], "hi", ("!",), ""),
        ([104, 105, 33, 34, 256], 'hi!"', (), "other tokens"),
        ([104, 105, 33], "hi", (), "not all tokens"),
    ],
)
def test_what_a_model_says_is_what_was_recorded(tmp_path: Path, tokens: list[int], text: str, stop, what: str) -> None:
    """Also of a stream with a stop string, of a model that was recorded without it."""
    answer = [104, 105, 33, 33, 256], "hi!!", STOP
    events = [[0.1, 1, 0, 0, tokens, len(tokens), STOP, 1]]
    line = line_of(replace(PARAMS, stop=stop), events, text, lengths=[len(tokens)], output_tokens=len(tokens))
    (tmp_path / FILE).write_text(json.dumps([(PROMPT, params_of(PARAMS), [answer], [])]))
    (tmp_path / "faults.jsonl").write_text("")
    (tmp_path / "history.jsonl").write_text(line.to_json() + "\n")
    found = check_folder(tmp_path).violations
    assert len(found) == bool(what) and all(what in violation for violation in found)


def verdict_of_cancelled(folder: Path, tokens: list[int]) -> list[str]:
    """On a best_of of a model whose returned branch is another one than what came of it before it was cancelled."""
    branches = [([65, 66, 67], "ABC", LENGTH), ([97, 98, 99], "abc", LENGTH), ([120, 121, 122], "xyz", LENGTH)]
    params = SamplingParams(seed=1, best_of=3, max_tokens=3)
    (folder / FILE).write_text(json.dumps([(PROMPT, params_of(params), branches[1:2], branches)]))
    events = [[0.1, 1, 0, 0, tokens, len(tokens), CANCELLED, 1]]
    text = bytes(tokens).decode()
    line = StreamLine(1, "a", "own", 100.0, PROMPT, params_of(params), 104.0, events, {"0": text}, "", "", {})
    (folder / "faults.jsonl").write_text("")
    (folder / "history.jsonl").write_text(line.to_json() + "\n")
    return check_folder(folder).violations


def test_a_cancelled_choice_of_a_model_may_be_any_branch(tmp_path: Path) -> None:
    for tokens in ([65, 66], [97], [120]):
        (found,) = verdict_of_cancelled(tmp_path, tokens)
        assert "ended with CANCELLED" in found
    assert "other tokens" in verdict_of_cancelled(tmp_path, [65, 98])[0]


def ranked_line(finish: int = STOP, num_tokens: int | None = None) -> StreamLine:
    """The answer of a best_of whose first choice is another one by the scores of all tokens."""
    oracle = Oracle("witness")
    asked = (SamplingParams(seed=seed, best_of=3, max_tokens=9, stop=("a", "e", "o", "x", "7")) for seed in range(100))
    params, late = next(
        (params, answer)
        for params in asked
        for answer in oracle.choices(PROMPT, params)
        if answer != oracle.outputs(PROMPT, params) and answer[0].finish_reason == STOP
    )
    tokens = list(late[0].token_ids)[:num_tokens]
    events = [[0.1, 1, 0, 0, tokens, len(tokens), finish, 1]]
    return line_of(params, events, late[0].text, lengths=[9] * 3, finishes=[STOP] * 3, output_tokens=len(tokens))


def test_a_choice_by_late_scores_is_right_and_a_cancelled_one_is_only_cancelled() -> None:
    found = verdict(ranked_line())
    assert (found.violations, found.ranked_late) == ([], 1)
    changed = ranked_line()
    changed.events[0][4][0] += 1
    assert "other tokens" in verdict(changed).violations[0]
    (cancelled,) = verdict(ranked_line(CANCELLED, 1)).violations
    assert "ended with CANCELLED" in cancelled
