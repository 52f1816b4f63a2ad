"""The cases of tests/csrc/simt_cases on the device, against float64: each group for its share of the time."""

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mirror import Mirror
from target import ROOT, deadline, target


def groups() -> dict[str, Callable[[Any], None]]:
    spec = importlib.util.spec_from_file_location("simt_cases", ROOT / "tests/csrc/simt_cases/__main__.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.GROUPS)


def main() -> None:
    t = target(
        cases={"type": int, "default": 0, "help": "of each group; 0: as many as there is time for"},
        only={"default": "", "help": "groups, separated by commas"},
        seed={"type": int, "default": 0},
    )
    mirror: Any = Mirror(t.extension, t.device)
    sys.modules["_C_cuda_simt"] = mirror
    chosen = {name: case for name, case in groups().items() if not t.options.only or name in t.options.only.split(",")}
    failed: list[str] = []
    ran: dict[str, int] = {}
    limit = t.pick(t.options.cases, 1)
    for place, (name, case) in enumerate(chosen.items()):
        share = (deadline() - time.monotonic()) / (len(chosen) - place)
        end = time.monotonic() + share * 0.9
        count = 0
        while (not limit or count < limit) and time.monotonic() < end:
            try:
                case(np.random.default_rng((t.options.seed, count)))
            except Exception as error:
                failed.append(f"{name}, case {count} of seed {t.options.seed}: {type(error).__name__}: {error}"[:600])
                if "CUDA error" in str(error) or "DeviceError" in type(error).__name__:
                    t.say("the device is lost to this process: " + failed[-1])
                    t.finish(False)
                break
            count += 1
        ran[name] = count
    t.say(f"{sum(ran.values())} cases agree with float64 ({', '.join(f'{n} {c}' for n, c in ran.items())})")
    for line in failed:
        t.say(f"- FAILED {line}")
    t.finish(not failed)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    main()
