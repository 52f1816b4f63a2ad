"""The requests that this router has counted, for metrics. gRPC and HTTP count alike."""

from collections import Counter
from collections.abc import Iterator, Mapping

from octavo.metrics.table import ANSWER_BOUNDS, TOKEN_BOUNDS
from octavo.metrics.value import Histogram, MetricValue
from octavo.request.errors import QueueFull, QuotaExceeded, reasons
from octavo.request.sampling import FinishReason

MAX_TENANTS = 32  # with a label of their own; the counters of a tenant that is named stay its own for the router's life
OTHER = "other"
REASONS = (QueueFull.reason, QuotaExceeded.reason)  # of refusals that are about the tenant
LEFT = "left"  # the end of a stream whose client has gone; the request goes on for its grace
DETACHED = "detached"  # the end of a stream that this router has ended; the request goes on
LOST = "lost"  # the end of a request of which the store has lost what was delivered
END_REASONS = (*(each.name.lower() for each in FinishReason if each is not FinishReason.NONE), LEFT, DETACHED, LOST)


class TenantTally:
    """The counts of one tenant, or of all that have no label of their own."""

    def __init__(self) -> None:
        self.num_accepted = 0
        self.num_prompt_tokens = self.num_output_tokens = 0  # of streams that have ended
        self.refusals: Counter[str] = Counter()


class TenantTallies:
    """The tallies by label: the first tenants that come have one each, the rest share one.

    Without API keys there is one tenant, which all other metrics are about.
    """

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


class ModelTally:
    """The counts and times of the requests of one model. Times are in seconds.

    Every reason is there from the beginning: Prometheus sees no increase in a series that begins with its first event.
    """

    def __init__(self) -> None:
        self.num_accepted = 0
        self.num_prompt_tokens = self.num_cached_tokens = self.num_output_tokens = 0
        self.ends: Counter[str] = Counter(dict.fromkeys(END_REASONS, 0))
        self.queued = Histogram(ANSWER_BOUNDS)
        self.first_token = Histogram(ANSWER_BOUNDS)
        self.between_tokens = Histogram(TOKEN_BOUNDS)
        self.total = Histogram(ANSWER_BOUNDS)

    def values(self, model: str, num_under_way: int) -> Iterator[MetricValue]:
        """`num_under_way`: tokens that streams which have not ended have sent."""
        numbers: dict[str, float | Histogram] = {
            "octavo_requests_accepted_total": self.num_accepted,
            "octavo_prompt_tokens_total": self.num_prompt_tokens,
            "octavo_cached_tokens_total": self.num_cached_tokens,
            "octavo_output_tokens_total": self.num_output_tokens + num_under_way,
            "octavo_queued_seconds": self.queued,
            "octavo_first_token_seconds": self.first_token,
            "octavo_token_seconds": self.between_tokens,
            "octavo_request_seconds": self.total,
        }
        for name, value in numbers.items():
            yield MetricValue(name, value, (model,))
        for reason, count in self.ends.items():
            yield MetricValue("octavo_requests_ended_total", count, (model, reason))


class RequestTally:
    """The tallies of all models that workers have served."""

    def __init__(self) -> None:
        self.num_attached = 0
        self.refusals: Counter[str] = Counter(dict.fromkeys(reasons(), 0))  # by the reason of the error
        self.tenants = TenantTallies()
        self.models: dict[str, ModelTally] = {}

    def of_model(self, name: str) -> ModelTally:
        """The tally of a model by its name, which workers chose and not clients."""
        if (tally := self.models.get(name)) is None:
            tally = self.models[name] = ModelTally()
        return tally

    def values(self, under_way: Mapping[str, int]) -> Iterator[MetricValue]:
        """All values, with the tokens by model that streams have sent which have not ended."""
        yield MetricValue("octavo_requests_attached_total", self.num_attached)
        for reason, count in self.refusals.items():
            yield MetricValue("octavo_requests_refused_total", count, (reason,))
        for model, tally in self.models.items():
            yield from tally.values(model, under_way.get(model, 0))
