"""`python -m router`: one router process."""

import logging
import signal
import sys


def main() -> int:
    # Until the event loop takes signals, Ctrl-C ends the process without a traceback: also while modules are loaded.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from octavo.process import loop, telemetry
    from octavo.settings.exposure import program_warning
    from octavo.settings.loading import parse
    from octavo.settings.router import RouterSettings

    settings = parse(RouterSettings)
    telemetry.configure("router", form=settings.log_format, level=settings.log_level)
    if warning := program_warning(settings):
        logging.getLogger(__name__).warning("%s", warning)
    from router.program import serve  # after the settings, whose errors need no second of imports

    return loop.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main())
