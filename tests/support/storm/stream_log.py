"""The log of what clients saw: one line of JSON per stream, written when it ends. It can be checked at any later time.

    {"stream", "request_id", "mode", "began", "ended", "prompt", "params", "events", "texts", "error", "record"}

`mode` is "own", "reader" (attached to the request of another stream from its first index on) or "leaver" (left before
the end). Times are of the monotonic clock, in seconds, which all processes of a machine share. An event is a list
[seconds since `began`, attach, branch, first index, tokens, new tokens, finish reason or 0, 1 if terminal]: what came
over the wire, and how many of its last tokens were passed on to the caller, because they were new. `record` is what the
store said of the request afterwards.
"""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.client import Event, SamplingParams
from octavo.client.receiver import StreamReceiver
from octavo.request.sampling import Constraint, Shape

PARAMS = ("temperature", "seed", "n", "best_of", "max_tokens", "stop", "beam_width")  # what streams of a storm choose


@dataclass(slots=True)
class StreamLine:
    """One stream of one client."""

    stream: int
    request_id: str
    mode: str
    began: float
    prompt: list[int]
    params: dict[str, Any]
    ended: float = 0.0
    events: list[list[Any]] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    error: str = ""  # the reason, for a stream that ended with an error or was unfinished at the end of the run
    message: str = ""
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def sampling(self) -> SamplingParams:
        return sampling_of(self.params)

    def to_json(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__}, separators=(",", ":"))


def sampling_of(params: Mapping[str, Any]) -> SamplingParams:
    form = params.get("constraint")
    constraint = None if form is None else Constraint(Shape(form[0]), form[1])
    return SamplingParams(**{**params, "stop": tuple(params.get("stop", ())), "constraint": constraint})


def params_of(sampling: SamplingParams) -> dict[str, Any]:
    found = {name: getattr(sampling, name) for name in PARAMS if getattr(sampling, name) not in (None, ())}
    form = sampling.constraint
    return found if form is None else {**found, "constraint": [form.shape, form.text]}


def read_log(path: Path) -> Iterator[StreamLine]:
    """The streams of a log. A line that was cut by the end of its writer is an error of the log, and raises."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield StreamLine(**json.loads(line))


class LoggedReceiver(StreamReceiver):
    """A receiver of the SDK that notes each event as it came, before it drops what is no news."""

    def __init__(self, line: StreamLine, num_branches: int) -> None:
        super().__init__((), num_branches)
        self._line = line
        self._attach = 0

    def restart(self) -> None:
        self._attach += 1
        super().restart()

    def resume(self) -> None:
        self._attach += 1
        super().resume()

    def accept(self, event: Event) -> Event | None:
        since = round(time.monotonic() - self._line.began, 3)
        terminal = int(event.finished is not None)
        seen = [since, self._attach, event.branch, event.first_index, list(event.token_ids), 0]
        self._line.events.append([*seen, int(event.finish_reason), terminal])
        new = super().accept(event)
        if new is not None:
            self._line.events[-1][5] = len(new.token_ids)
            self._line.texts[str(event.branch)] = self._line.texts.get(str(event.branch), "") + new.text
        return new
