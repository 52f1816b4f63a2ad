"""How many files a process may have open, and so how many connections it can take."""

import logging
import resource
from contextlib import suppress

RESERVED = 512  # for what is no connection of a client: workers, the store, files of a model
LISTENERS = 2  # of a router: for gRPC and for HTTP

log = logging.getLogger(__name__)


def connection_limit(wanted: int) -> int:
    """How many connections each of the two listeners may have: `wanted`, or fewer if the limit of open files does not
    suffice.

    Raises the limit of this process to what the system allows it. Without a bound, connections of strangers would take
    the files by which a program reaches its store.
    """
    needed = RESERVED + LISTENERS * wanted
    soft, most = (needed if limit == resource.RLIM_INFINITY else limit for limit in _limits())
    if soft < min(needed, most):
        with suppress(ValueError, OSError):  # what there is has to do
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, most), _limits()[1]))
            soft = min(needed, most)
    limit = max(1, min(wanted, (soft - RESERVED) // LISTENERS))
    if limit < wanted:
        log.info("%d connections at most: %d files may be open (raise the limit with ulimit -n)", limit, soft)
    return limit


def _limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)
