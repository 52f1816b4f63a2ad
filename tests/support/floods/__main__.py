"""One attack, from a process of its own: `python -m floods NAME GRPC HTTP SECONDS SCALE [tls]`. Prints what it did."""

import asyncio
import json
import resource
import sys
import time

from floods.attacks import ATTACKS, TLS_ATTACKS, Target


def address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


async def main() -> None:
    name, grpc, http, seconds, scale, *tls = sys.argv[1:]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    target = Target(address(grpc), address(http), float(seconds), int(scale), bool(tls))
    target.until = time.monotonic() + target.seconds
    await (ATTACKS | TLS_ATTACKS)[name](target)
    print(json.dumps(target.counts))


asyncio.run(main())
