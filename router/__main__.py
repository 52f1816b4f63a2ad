"""`python -m router`: one router process."""

import logging
import sys

from octavo import loop, telemetry
from octavo.listen_address import exposure_warning
from octavo.settings import RouterSettings, parse
from router.program import serve


def main() -> int:
    settings = parse(RouterSettings)
    telemetry.configure("router", form=settings.log_format, level=settings.log_level)
    if warning := exposure_warning([settings.address, settings.admin_listen]):
        logging.getLogger(__name__).warning("%s", warning)
    return loop.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main())
