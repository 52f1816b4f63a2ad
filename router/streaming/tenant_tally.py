"""What this router has counted of each tenant. The first tenants that come have a label each, the rest share one."""

from collections import Counter
from collections.abc import Iterator, Mapping

from octavo.metrics.value import MetricValue
from octavo.request.errors import QueueFull, QuotaExceeded

MAX_TENANTS = 32  # with a label of their own; the counters of a tenant that is named stay its own for the router's life
OTHER = "other"
REASONS = (QueueFull.reason, QuotaExceeded.reason)  # of refusals that are about the tenant


class TenantTally:
    """The counts of one tenant, or of all that have no label of their own."""

    def __init__(self) -> None:
        self.num_accepted = 0
        self.num_prompt_tokens = self.num_output_tokens = 0  # of streams that have ended
        self.refusals: Counter[str] = Counter()


class TenantTallies:
    """The tallies by label. Without API keys there is one tenant, which all other metrics are about."""

    def __init__(self) -> None:
        self._tallies = {OTHER: TenantTally()}

    def of(self, tenant: str) -> TenantTally:
        return self._tallies[self._label(tenant)]

    def values(self, open_streams: Mapping[str, int]) -> Iterator[MetricValue]:
        """All values; `open_streams` says how many streams each tenant has."""
        streams: Counter[str] = Counter()
        for tenant, count in open_streams.items():
            if tenant:
                streams[self._label(tenant)] += count
        for label, tally in self._tallies.items():
            yield MetricValue("octavo_tenant_streams", streams[label], (label,))
            yield MetricValue("octavo_tenant_requests_total", tally.num_accepted, (label,))
            yield MetricValue("octavo_tenant_tokens_total", tally.num_prompt_tokens, (label, "prompt"))
            yield MetricValue("octavo_tenant_tokens_total", tally.num_output_tokens, (label, "output"))
            for reason in REASONS:
                yield MetricValue("octavo_tenant_refused_total", tally.refusals[reason], (label, reason))

    def _label(self, tenant: str) -> str:
        if tenant and tenant not in self._tallies and len(self._tallies) <= MAX_TENANTS:
            self._tallies[tenant] = TenantTally()
        return tenant if tenant in self._tallies else OTHER
