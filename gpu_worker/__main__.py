"""`python -m gpu_worker`: one worker process."""

import logging
import signal
import sys


def main() -> int:
    # Until the event loop takes signals, Ctrl-C ends the process without a traceback: also while modules are loaded.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from gpu_worker.serving.process.memory_keeper import keep_memory_for_last
    from octavo.process import loop, telemetry
    from octavo.settings.exposure import program_warning
    from octavo.settings.loading import parse
    from octavo.settings.worker import WorkerSettings

    settings = parse(WorkerSettings)
    telemetry.configure("worker", form=settings.log_format, level=settings.log_level)
    if warning := program_warning(settings):
        logging.getLogger(__name__).warning("%s", warning)
    if settings.standby:  # others go on from this worker's streams as soon as they notice its death
        keep_memory_for_last()
    from gpu_worker.serving.process.program import serve  # after the settings, whose errors need no seconds of torch

    return loop.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main())
