"""Classic bugs in the thread pool: missing waits, and orders of memory that only ThreadSanitizer tells apart here."""

import re
from pathlib import Path

import pool_program
from mutant import Sources, Suite, read


def first_failure(folder: Path, which: str) -> str | None:
    how, promise = which.split(" ")
    done = pool_program.run(pool_program.made(folder / "csrc", folder / "build", how), promise)
    if done.returncode == 0:
        return None
    found = re.search(r"ThreadSanitizer: [\w ]+|broken: .*", done.stderr)
    return f"{promise} ({how}): {found[0] if found else f'ended with {done.returncode}'}"


POOL = Suite(read("pool"), Sources, first_failure)
