"""`octavo doctor`: what this machine lacks. `octavo up` asks some of the checks first, and ends with their words."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What one check has found. Only `bad` keeps `octavo up` from working; `fix` says what to do."""

    name: str
    result: Literal["ok", "note", "bad"]
    detail: str
    fix: str = ""
