"""Nothing in a test run may load a pickle that names a class or a function: such a pickle can run any code."""

import sys
from typing import Any

# Modules that load pickles which they have made themselves, for another process of the same test.
ALLOWED = ("multiprocessing", "concurrent.futures")
_PICKLE = ("pickle", "_pickle", "_compat_pickle")


class UnpicklingRefused(Exception):
    """A pickle was loaded. The message says by whom."""


def refuse_unpickling(event: str, _: Any) -> None:
    """An audit hook. Python calls it for every name that a pickle asks for."""
    if event != "pickle.find_class":
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PICKLE:
        frame = frame.f_back
    caller = str(frame.f_globals.get("__name__", ""))
    if not caller.startswith(ALLOWED):
        raise UnpicklingRefused(f"{caller} loads a pickle: {frame.f_code.co_filename}:{frame.f_lineno}")


def install() -> None:
    """For the life of this process: an audit hook cannot be removed."""
    sys.addaudithook(refuse_unpickling)
