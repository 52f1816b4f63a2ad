"""The programs in examples/, as tests run them: one client per language, with the same parts and the same lines."""

import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUN_S = 90.0
LINE = re.compile(rb"^([a-z]+) (ok|failed|reading) (.*)$", re.MULTILINE)


def languages() -> list[str]:
    """Those that OCTAVO_TEST_CLIENTS names, or all that have a Makefile."""
    chosen = os.environ.get("OCTAVO_TEST_CLIENTS", "").split()
    return chosen or sorted(makefile.parent.name for makefile in EXAMPLES.glob("*/Makefile"))


@dataclass(frozen=True, slots=True)
class Part:
    """What one part of an example said: `name verdict key=value …`, and the bytes that it printed before."""

    name: str
    verdict: str
    values: dict[str, str]
    printed: bytes


@dataclass(frozen=True, slots=True)
class Example:
    """One client, which is built."""

    language: str

    def run(
        self, endpoints: Sequence[str], *parts: str, when_reading: Callable[[str], None] | None = None
    ) -> tuple[int, list[Part]]:
        """The exit code, and what each part said. `when_reading` is called with the endpoint of a stream under way."""
        command = ["make", "--silent", "run", f"ENDPOINTS={','.join(endpoints)}", f"PARTS={' '.join(parts)}"]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        lines: list[bytes] = []
        with tempfile.TemporaryFile() as complaints:
            process = subprocess.Popen(
                command,
                cwd=EXAMPLES / self.language,
                env=inherited,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=complaints,
                start_new_session=True,
            )
            limit = threading.Timer(RUN_S, os.killpg, (process.pid, signal.SIGKILL))
            limit.start()
            with process:
                for line in process.stdout or ():
                    lines.append(line)
                    if when_reading is not None and line.startswith(b"attach reading from="):
                        when_reading(line.decode().strip().partition("=")[2])
            limit.cancel()
            complaints.seek(0)
            complained = complaints.read()
        text = b"".join(lines)
        print(f"--- {self.language} {' '.join(parts)}: exit code {process.returncode}")
        print((text + complained).decode(errors="replace"))
        return process.returncode, read_parts(text)


def read_parts(text: bytes) -> list[Part]:
    """The parts of an output. What stands between two lines of parts is what the latter printed."""
    found, end = [], 0
    for match in LINE.finditer(text):
        values = dict(word.partition("=")[::2] for word in match[3].decode().split(" ") if "=" in word)
        found.append(Part(match[1].decode(), match[2].decode(), values, text[end : match.start()]))
        end = match.end() + 1
    return found
