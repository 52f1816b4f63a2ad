"""What tenants have used of their quotas, for sequences that were accepted under one."""

from dataclasses import dataclass
from typing import NamedTuple

from octavo.request.limits import TenantQuota

PARTS = 60_000  # of a token: a bucket gains as many parts per ms as it gains tokens per minute
STREAM_RETRY_MS = 1000  # nobody knows when a stream will end
MAX_DEBT_MS = 30 * 24 * 3600 * 1000  # a debt is forgotten after that


class SequenceQuota(NamedTuple):
    """The quota under which a sequence was accepted, and how many tokens were taken out of the bucket for it."""

    limits: TenantQuota
    taken: int


class TokenBucket(NamedTuple):
    """What a tenant may use: `level` parts of tokens at a time; below 0 after more was used than had been expected."""

    level: int
    at_ms: int
    full_at_ms: int


@dataclass(slots=True)
class TenantBuckets:
    """The buckets of all tenants; one that is not there is full."""

    buckets: dict[str, TokenBucket]

    def missing_ms(self, tenant: str, rate: int, tokens: int, now_ms: int) -> int:
        """How long until so many tokens, or a minute's if these are fewer, are in the bucket; 0: they are."""
        missing = min(tokens, rate) * PARTS - self._level(tenant, rate, now_ms)
        return max(0, -(-missing // rate))

    def draw(self, tenant: str, rate: int, tokens: int, now_ms: int) -> None:
        """Takes tokens out of the bucket; less than 0: puts some back."""
        level = self._level(tenant, rate, now_ms) - tokens * PARTS
        if level >= rate * PARTS:
            self.buckets.pop(tenant, None)
            return
        full_in = min(MAX_DEBT_MS, -(-(rate * PARTS - level) // rate))
        self.buckets[tenant] = TokenBucket(level, now_ms, now_ms + full_in)

    def _level(self, tenant: str, rate: int, now_ms: int) -> int:
        bucket = self.buckets.get(tenant)
        if bucket is None or bucket.full_at_ms <= now_ms:
            return rate * PARTS
        return min(rate * PARTS, bucket.level + rate * max(0, now_ms - bucket.at_ms))
