"""How much a tenant may ask for at once and per minute. A stream that was accepted is never ended for a quota."""

from typing import NamedTuple


class TenantQuota(NamedTuple):
    """The limits of one tenant, over all routers of a store. 0: no such limit."""

    max_streams: int = 0  # requests that were accepted and have not ended, whether they wait or run
    tokens_per_minute: int = 0  # of prompts and outputs


NO_QUOTA = TenantQuota()
MAX_STREAMS = 1_000_000
MAX_TOKENS_PER_MINUTE = 1_000_000_000
