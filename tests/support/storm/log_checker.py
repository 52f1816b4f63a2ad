"""Checks the log of a run's streams against what docs/protocol.md promises about delivery.

    PYTHONPATH=tests/support python -m storm.log_checker FOLDER     # of a run of `make chaos`

Each stream is checked for itself: on every attach the indexes are contiguous; what was passed on is each token once and
is what the oracle says; exactly one terminal event, and nothing after it; the text belongs to the tokens; the record's
journals are as long as what was delivered.
"""

import json
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from constraints import JSON_FORMS, check_json
from live.oracle import Expected, Oracle
from storm.reference import FILE, Answers, RecordedAnswers
from storm.stream_log import StreamLine, read_log

from octavo.client import SamplingParams

LENGTH, STOP, CANCELLED = 2, 1, 3
NOTICEABLE_S = 0.5  # a shorter gap is no fault's
LOSES_DATA = "promotion-lossy"
LOST = ("HISTORY_LOST",)


@dataclass(frozen=True, slots=True)
class FaultTime:
    """When a fault was there."""

    kind: str
    began: float
    ended: float


@dataclass
class Verdict:
    """What a log comes to."""

    streams: Counter[str] = field(default_factory=Counter)  # by mode
    requests: Counter[str] = field(default_factory=Counter)  # by kind: one may be of several
    ends: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    reattaches: int = 0
    data_loss: int = 0
    inside_json: Counter[str] = field(default_factory=Counter)  # changes of owner in the midst of JSON; whole outputs
    records_not_compared: int = 0
    ranked_late: int = 0  # best_of whose choice is another one because no router read a stop string in time
    first_token_s: list[float] = field(default_factory=list)
    gaps_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    violations: list[str] = field(default_factory=list)
    ended_otherwise: list[str] = field(default_factory=list)  # a line per stream that ended other than by its own end


class LogChecker:
    """Knows the faults of the run, by which gaps are told apart and DATA_LOSS is allowed."""

    def __init__(self, faults: Iterable[FaultTime], answers: Answers | None = None) -> None:
        """`answers` are those of a model, else those of the witness."""
        self.verdict = Verdict()
        self._answers = answers or Oracle("witness")
        self._faults = sorted(faults, key=lambda fault: fault.began)
        self._begins = [fault.began for fault in self._faults]

    def check_all(self, lines: Iterable[StreamLine]) -> Verdict:
        for line in lines:
            self.check_stream(line)
        return self.verdict

    def check_stream(self, line: StreamLine) -> None:
        verdict = self.verdict
        verdict.streams[line.mode] += 1
        verdict.requests.update(kinds_of(line.sampling))
        attaches = {event[1] for event in line.events}
        verdict.reattaches += max(0, len(attaches) - 1)
        try:
            self._check_events(line)
            self._check_end(line)
        except AssertionError as error:
            verdict.violations.append(f"{_name(line)}: {error}")
        self._note_gaps(line)
        self._note_json(line)

    def _check_events(self, line: StreamLine) -> None:
        expected = self._expected(line)
        delivered: dict[int, list[int]] = defaultdict(list)
        next_index: dict[tuple[int, int], int] = {}
        finishes: dict[int, int] = {}
        terminals: Counter[int] = Counter()
        for _, attach, branch, first, tokens, num_new, finish, terminal in line.events:
            assert not terminals[attach], f"attach {attach}: an event after the terminal one"
            assert branch < len(expected), f"branch {branch} was not asked for"
            due = next_index.get((attach, branch), first)
            assert first == due, f"attach {attach}, branch {branch}: index {first} where {due} is due"
            assert first <= len(delivered[branch]), f"branch {branch}: a gap before index {first}"
            next_index[attach, branch] = first + len(tokens)
            output = expected[branch].token_ids
            assert tuple(tokens) == output[first : first + len(tokens)], f"branch {branch}: other tokens at {first}"
            if num_new:
                new = tokens[len(tokens) - num_new :]
                assert first + len(tokens) - num_new == len(delivered[branch]), f"branch {branch}: passed on twice"
                delivered[branch] += new
            finishes[branch] = finish or finishes.get(branch, 0)
            terminals[attach] += terminal
        self.verdict.tokens += sum(map(len, delivered.values()))
        assert sum(terminals.values()) <= 1, f"{sum(terminals.values())} terminal events"
        ended_well = bool(sum(terminals.values())) and not line.error
        if ended_well:
            self._check_outputs(line, expected, delivered, finishes)
        else:
            assert line.mode == "leaver" or line.error, "no terminal event"

    def _expected(self, line: StreamLine) -> list[Expected]:
        """The right answer that agrees with what came; if none does, the usual one."""
        cancelled = CANCELLED in {event[6] for event in line.events}
        choices = self._answers.choices(line.prompt, line.sampling, cancelled=cancelled)
        found = next((choice for choice in choices if agrees(choice, line)), choices[0])
        self.verdict.ranked_late += found != choices[0] and not cancelled
        return found

    def _check_outputs(
        self, line: StreamLine, expected: Sequence[Expected], delivered: dict[int, list[int]], finishes: dict[int, int]
    ) -> None:
        if CANCELLED in finishes.values():
            line.error = "CANCELLED"
            return
        for branch, output in enumerate(expected):
            assert tuple(delivered[branch]) == output.token_ids, f"branch {branch}: not all tokens"
            assert line.texts.get(str(branch), "") == output.text, f"branch {branch}: another text"
            assert finishes[branch] == output.finish_reason, f"branch {branch}: ended otherwise"
            if finishes[branch] == STOP and not line.sampling.stop and line.sampling.constraint in JSON_FORMS:
                check_json(line.sampling.constraint, line.texts[str(branch)])
                self.verdict.inside_json["whole outputs, which are valid"] += 1
        if line.mode == "own":
            self._check_record(line, delivered, finishes)

    def _check_record(self, line: StreamLine, delivered: dict[int, list[int]], finishes: dict[int, int]) -> None:
        record = line.record
        if "error" in record:
            self.verdict.records_not_compared += 1
            allowed = self._data_were_lost(line)
            assert allowed or record["error"] not in ("NOT_FOUND", *LOST), f"the record is gone: {record['error']}"
            return
        num_delivered = sum(map(len, delivered.values()))
        is_whole = record["state"] == "DONE" and record["output_tokens"] == num_delivered
        if not is_whole and self._data_were_lost(line):  # its end, or that a stop string stands before it
            self.verdict.records_not_compared += 1
            return
        assert record["state"] == "DONE", f"the record says {record['state']}"
        assert record["output_tokens"] == num_delivered, f"usage {record['output_tokens']}, delivered {num_delivered}"
        if line.sampling.best_of <= line.sampling.n and not line.sampling.beam_width:
            for branch, length in enumerate(record["lengths"]):
                wanted = len(delivered[branch])
                exact = finishes[branch] == LENGTH
                assert length == wanted if exact else length >= wanted, f"journal {length}, delivered {wanted}"

    def _check_end(self, line: StreamLine) -> None:
        verdict = self.verdict
        if not line.error:
            verdict.ends["left" if line.mode == "leaver" else "own end"] += 1
            return
        verdict.ends[line.error] += 1
        verdict.ended_otherwise.append(f"{_name(line)}: {line.error}: {line.message} {line.record.get('timeline', '')}")
        if line.error in LOST and self._data_were_lost(line):
            verdict.data_loss += 1
            return
        raise AssertionError(f"ended with {line.error}: {line.message}")

    def _data_were_lost(self, line: StreamLine) -> bool:
        """Whether the store has lost writes while the stream ran: only then a stream may end with DATA_LOSS."""
        lossy = (fault for fault in self._faults if fault.kind == LOSES_DATA)
        return any(line.began - 1 <= fault.ended and fault.began <= line.ended + 1 for fault in lossy)

    def _note_gaps(self, line: StreamLine) -> None:
        if not line.events:
            return
        if not line.sampling.ranked:  # ranked branches are delivered at their end
            self.verdict.first_token_s.append(line.events[0][0])
        times = [line.began + event[0] for event in line.events]
        for before, after in pairwise(times):
            if after - before >= NOTICEABLE_S:
                self.verdict.gaps_s[self._kind_at(before, after)].append(after - before)

    def _note_json(self, line: StreamLine) -> None:
        """Counts the changes of owner after the first token. A timeline begins later than its stream, never earlier."""
        if line.sampling.constraint not in JSON_FORMS or not line.events or line.mode != "own":
            return
        for entry in line.record.get("timeline", ()):
            after_ms, what, detail = entry.split(" ", 2)
            if int(after_ms) > 1000 * line.events[0][0] and what in ("taken", "migrated"):
                self.verdict.inside_json[f"{what} {detail.split(' ')[1]}" if what == "taken" else what] += 1

    def _kind_at(self, before: float, after: float) -> str:
        """The kind of the fault that was there in the gap and began the nearest to the gap's begin; else "none"."""
        last = bisect_right(self._begins, after)
        there = [fault for fault in self._faults[max(0, last - 50) : last] if fault.ended >= before - NOTICEABLE_S]
        return min(there, key=lambda fault: abs(fault.began - before)).kind if there else "none"


def agrees(answer: Sequence[Expected], line: StreamLine) -> bool:
    """Whether all tokens of a log are those of an answer."""
    return all(
        branch < len(answer) and tuple(tokens) == answer[branch].token_ids[first : first + len(tokens)]
        for _, _, branch, first, tokens, *_ in line.events
    )


def kinds_of(sampling: SamplingParams) -> list[str]:
    """What is special about a request, in words."""
    found = {
        "beams": sampling.beam_width,
        "best_of": sampling.best_of > sampling.n,
        "several branches": sampling.n > 1,
        "a seed": sampling.seed is not None,
        "stop strings": sampling.stop,
        "JSON": sampling.constraint in JSON_FORMS,
        "another form": sampling.constraint is not None and sampling.constraint not in JSON_FORMS,
    }
    return [kind for kind, is_so in found.items() if is_so] or ["greedy"]


def _name(line: StreamLine) -> str:
    num_tokens = sum(event[5] for event in line.events)
    kind = " ".join(f"{name}={value}" for name, value in line.params.items() if name not in ("seed", "stop"))
    time = f"{line.began:.1f} to {line.ended:.1f} s"
    return f"stream {line.stream} ({line.mode}, {line.request_id}, {kind}, {time}, {num_tokens} tokens)"


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"p50": round(percentile(values, 0.5), 2), "p99": round(percentile(values, 0.99), 2)}


def check_folder(folder: Path) -> Verdict:
    """The verdict on a run's folder: history.jsonl and faults.jsonl, and the answers of a model if there are any."""
    faults = [json.loads(line) for line in (folder / "faults.jsonl").read_text(encoding="utf-8").splitlines()]
    times = [FaultTime(fault["kind"], fault["began"], fault["ended"]) for fault in faults]
    answers = RecordedAnswers(folder / FILE) if (folder / FILE).exists() else None
    return LogChecker(times, answers).check_all(read_log(folder / "history.jsonl"))


def summary(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON. Per fault kind: how many gaps, p50, p99 and the longest, in seconds."""
    gaps = sorted(verdict.gaps_s.items())
    table = {kind: {"count": len(each), **spread(each), "max": round(max(each), 2)} for kind, each in gaps}
    return {**vars(verdict), "first_token_s": spread(verdict.first_token_s), "gaps_s": table}


if __name__ == "__main__":
    found = check_folder(Path(sys.argv[1]))
    print(json.dumps(summary(found), indent=2))
    sys.exit(1 if found.violations else 0)
