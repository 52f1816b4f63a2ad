"""`python -m gpu_worker`: one worker process."""

import logging
import sys

from gpu_worker.serving.program import serve
from octavo import loop, telemetry
from octavo.listen_address import exposure_warning
from octavo.settings import WorkerSettings, parse


def main() -> int:
    settings = parse(WorkerSettings)
    telemetry.configure("worker", form=settings.log_format, level=settings.log_level)
    if warning := exposure_warning([settings.address]):
        logging.getLogger(__name__).warning("%s", warning)
    return loop.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main())
