"""Which calls for vectors may come in: how much may be under way here, and what is left of a tenant's quota.

What is counted is of this router alone: a vector has no record, so the store does not hear of it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from octavo.request.errors import Draining, QueueFull, QuotaExceeded
from octavo.request.limits import TenantQuota
from octavo.store.calls import QueueLimits
from octavo.store.memory.quotas import STREAM_RETRY_MS, TenantBuckets

FULL_RETRY_MS = 1000


class PoolingGate:
    """Counts what is under way. The bounds are those of the queue: a prompt counts as a request."""

    def __init__(self, limits: QueueLimits) -> None:
        self.num_prompts = 0
        self.num_tokens = 0
        self._draining = False
        self._limits = limits
        self._prompts: Counter[str] = Counter()  # of each tenant
        self._tokens: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._buckets = TenantBuckets({})
        self._empty = asyncio.Event()

    @contextmanager
    def admit(self, tenant: str, quota: TenantQuota, num_prompts: int, num_tokens: int) -> Iterator[None]:
        """Inside, the call is under way. Raises Draining, QueueFull or QuotaExceeded.

        A call that finds nothing under way comes in whatever its size.
        """
        self._require_room(tenant, num_prompts, num_tokens)
        self._use_quota(tenant, quota, num_tokens)
        counted = ((self._prompts, num_prompts), (self._tokens, num_tokens), (self._calls, 1))
        for counter, count in counted:
            counter[tenant] += count
        self.num_prompts += num_prompts
        self.num_tokens += num_tokens
        try:
            yield
        finally:
            self.num_prompts -= num_prompts
            self.num_tokens -= num_tokens
            for counter, count in counted:
                counter[tenant] -= count
                if not counter[tenant]:
                    del counter[tenant]
            self._note_empty()

    def refuse_calls(self) -> None:
        """Refuses new calls. Those that are under way go on."""
        self._draining = True
        self._note_empty()

    def _note_empty(self) -> None:
        if self._draining and not self.num_prompts:
            self._empty.set()

    async def wait_until_empty(self) -> None:
        """Returns when calls are refused, and none is under way any more."""
        await self._empty.wait()

    def _require_room(self, tenant: str, num_prompts: int, num_tokens: int) -> None:
        if self._draining:
            raise Draining("this router is about to end: call another one")
        limits = self._limits
        bounds = [
            ("max_queued_requests", self.num_prompts, num_prompts, limits.max_requests),
            ("max_queued_tokens", self.num_tokens, num_tokens, limits.max_tokens),
            ("max_tenant_requests", self._prompts[tenant], num_prompts, limits.tenant_requests),
            ("max_tenant_tokens", self._tokens[tenant], num_tokens, limits.tenant_tokens),
        ]
        for name, used, asked, most in bounds:
            if most and used and used + asked > most:
                said = f"{used} are under way here, and the limit is {most} ({name}): retry later, or with fewer inputs"
                raise QueueFull(said, retry_after_ms=FULL_RETRY_MS)

    def _use_quota(self, tenant: str, quota: TenantQuota, num_tokens: int) -> None:
        if quota.max_streams and self._calls[tenant] >= quota.max_streams:
            said = f"this tenant has {quota.max_streams} calls for vectors under way here, which is its quota"
            raise QuotaExceeded(f"{said}: retry when one has ended", quota="streams", retry_after_ms=STREAM_RETRY_MS)
        rate = quota.tokens_per_minute
        if not rate:
            return
        now_ms = int(time.monotonic() * 1000)
        if missing_ms := self._buckets.missing_ms(tenant, rate, num_tokens, now_ms):
            said = f"this tenant has used its quota of {rate} tokens per minute: retry after the delay"
            raise QuotaExceeded(said, quota="tokens_per_minute", retry_after_ms=missing_ms)
        self._buckets.draw(tenant, rate, num_tokens, now_ms)
