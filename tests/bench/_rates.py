"""What the cores of this machine do at most with the instruction that a kernel multiplies with: rates.c's loops."""

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

TURN_S = 0.008
IN_A_ROUND = 12
# Products and sums of one, of numbers as wide as its own.
OPERATIONS = {"vfmadd512": 32, "vfmadd256": 16, "vdpbf16ps": 64, "vpdpbusd": 128, "vpmaddubsw": 64, "vpmaddwd": 32}
OPERATIONS |= {"tdpbf16ps": 16384, "tdpbusd": 32768}


def of_floats(isa: str) -> str:
    """Nothing where products are plain C++."""
    if isa in ("generic", "emulated"):
        return ""
    return "vfmadd512" if isa.startswith(("avx512", "amx")) else "vfmadd256"


def of_bfloat16(isa: str) -> str:
    return {"amx": "tdpbf16ps", "avx512_bf16": "vdpbf16ps"}.get(isa, of_floats(isa))


def of_digits(isa: str, form: str, columns: int) -> tuple[str, int]:
    """And how often it multiplies each number: digits apart, or both at once (docs/native.md)."""
    if isa == "amx" and columns >= 12 and form not in ("q3_k", "q6_k"):
        return "tdpbusd", 2
    if isa.startswith(("avx512", "amx")):
        return "vpdpbusd", 2
    if isa != "avx2":
        return "", 1
    few = 3 if form in ("q8", "q8_rows", "q6_k", "iq4_nl", "iq4_xs") else 4
    return ("vpmaddubsw", 2) if columns < few else ("vpmaddwd", 1)


@cache
def _loops() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "rates.so"
        source = Path(__file__).with_name("rates.c")
        command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))


@cache
def rate_side(instruction: str, threads: int) -> tuple[Callable[[], float], float]:
    """A side, all threads at once, and how many operations a turn of it has."""
    loop, pool = getattr(_loops(), instruction), ThreadPoolExecutor(threads)

    def once(rounds: int) -> float:
        begin = time.perf_counter()
        for done in [pool.submit(loop, ctypes.c_long(rounds)) for _ in range(threads)]:
            done.result()
        return time.perf_counter() - begin

    rounds = 100_000
    rounds = int(rounds * TURN_S / min(once(rounds) for _ in range(3)))
    return lambda: once(rounds), float(threads * rounds * IN_A_ROUND * OPERATIONS[instruction])
