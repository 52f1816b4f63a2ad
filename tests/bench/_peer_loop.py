"""A peer's half of `_peer.py`, for whichever interpreter the peer lives in: lines of JSON, in and out."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable

from _cases import Case, from_message
from torch import Tensor

SAMPLE = 256  # numbers of a result that are compared
Op = tuple[Callable[[], object], Callable[[], Tensor]]  # does it; what came out


def serve(make: Callable[[Case], Op | None]) -> None:
    """A case is answered with the first numbers of its result, or null if there is no such op; null with seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    op: Op | None = None
    for line in sys.stdin:
        message = json.loads(line)
        answer: object
        if message is None:
            assert op is not None
            begin = time.perf_counter()
            op[0]()
            answer = time.perf_counter() - begin
        else:
            op = None  # its memory first
            try:
                op = make(from_message(message))
                answer = op and (op[0](), op[1]().flatten()[:SAMPLE].tolist())[1]
            except Exception:
                traceback.print_exc()
                op, answer = None, None
        print(json.dumps(answer), file=answers, flush=True)
