"""`python -m router`: one router process."""

import sys

from octavo import loop, telemetry
from octavo.settings import RouterSettings, parse
from router.program import serve


def main() -> int:
    settings = parse(RouterSettings)
    telemetry.configure("router", form=settings.log_format, level=settings.log_level)
    return loop.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main())
