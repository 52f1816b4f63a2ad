"""What one check of `octavo doctor` finds."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What was found. `note` is worth knowing and stops nothing."""

    name: str
    result: Literal["ok", "note", "bad"]
    detail: str
    fix: str = ""
