"""`python -m router`: one router process."""

import asyncio
import sys

from octavo import telemetry
from octavo.settings import RouterSettings, parse
from router.program import serve


def main() -> int:
    settings = parse(RouterSettings)
    telemetry.configure("router", form=settings.log_format, level=settings.log_level)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(serve(settings))
    return uvloop.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main())
