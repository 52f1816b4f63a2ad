"""What the programs of this folder share: each is a list of cases, and each case is a user's call of one package.

`python use_NAME.py http://HOST:PORT MODEL [CASE ...]` does these cases, or all, once for each line that it reads, and
prints the value of each as a line of JSON, or what went wrong. Values are equal whenever the same is asked.
"""

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

ROUTER = sys.argv[1]
BASE = f"{ROUTER}/v1"
MODEL, *CHOSEN = sys.argv[2:]
CASES: list[Callable[[], Any]] = []
TELL, WHO = "Tell me a story of the sea.", "Invent a person with a name, an age and a mood. Answer in JSON."
STORY, ASKED_WHO = ([{"role": "user", "content": text}] for text in (TELL, WHO))
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """A decorator of functions that return something that JSON can say."""
    if not CHOSEN or function.__name__ in CHOSEN:
        CASES.append(function)
    return function


def run(**further: Callable[[], Any]) -> None:
    """Answers all lines; `further` are cases that need no more than an expression."""
    for name, function in further.items():
        function.__name__ = name
        case(function)
    for _ in sys.stdin:
        for function in CASES:
            line = {"case": function.__name__}
            try:
                line["value"] = function()
            except Exception as error:
                line["error"] = "".join(traceback.format_exception_only(error))
            print(json.dumps(line), flush=True)
        print("{}", flush=True)  # the end of a round
