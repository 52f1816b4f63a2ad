"""`python -m gpu_worker`: one worker process."""

import asyncio
import sys

from gpu_worker.program import serve
from octavo import telemetry
from octavo.settings import WorkerSettings, parse


def main() -> int:
    settings = parse(WorkerSettings)
    telemetry.configure("worker", form=settings.log_format, level=settings.log_level)
    return asyncio.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main())
