"""The table of all metrics: names, kinds, labels and what each one says. Nothing else is exposed.

Labels have few values: a model, a reason, a kind, one of the first tenants. No request, sequence or text
is ever a label.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

ROUTER, WORKER = "router", "worker"
BOTH = (ROUTER, WORKER)

# In seconds. Of answers: from a token of a fast model to a long output on a CPU. Of calls: from the store's best to a
# call that hangs. Of steps: from a fake runner to a long prompt on a CPU.
ANSWER_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
CALL_BOUNDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.0, 10.0)
STEP_BOUNDS = (0.0002, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
STALL_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class MetricKind(StrEnum):
    """What the values of a metric do: rise only, rise and fall, or fall into buckets."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, and which programs expose it. A name ends in its unit; that of a counter in `_total` after it."""

    name: str
    kind: MetricKind
    programs: tuple[str, ...]
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()  # of a histogram

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which Prometheus has its values."""
        if self.kind is MetricKind.HISTOGRAM:
            return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")
        return (self.name,)


def _counter(name: str, program: str, help: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.COUNTER, (program,), help, labels)


def _gauge(name: str, program: str, help: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.GAUGE, (program,), help, labels)


def _histogram(name: str, program: str, bounds: tuple[float, ...], help: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.HISTOGRAM, (program,), help, labels, bounds)


_ALL = (
    Metric(
        "octavo_build_info",
        MetricKind.GAUGE,
        BOTH,
        "Always 1. Which program and version this is.",
        ("program", "version"),
    ),
    Metric("octavo_up_seconds", MetricKind.GAUGE, BOTH, "How long this process has been up."),
    Metric("octavo_serving", MetricKind.GAUGE, BOTH, "1 if health says SERVING for the program's own service, else 0."),
    Metric(
        "octavo_store_call_seconds",
        MetricKind.HISTOGRAM,
        BOTH,
        "Calls of the store's functions that were answered.",
        ("function",),
        CALL_BOUNDS,
    ),
    Metric(
        "octavo_store_errors_total",
        MetricKind.COUNTER,
        BOTH,
        "Calls of the store's functions that failed: no answer, or no memory.",
        ("function",),
    ),
    Metric(
        "octavo_calls_refused_total",
        MetricKind.COUNTER,
        BOTH,
        "Calls and connections that were refused for who makes them, by listener and reason.",
        ("listener", "reason"),
    ),
    Metric(
        "octavo_admin_calls_total",
        MetricKind.COUNTER,
        BOTH,
        "Calls of operators that were let in; the log names who made each.",
        ("method",),
    ),
    _gauge(
        "octavo_api_keys",
        ROUTER,
        "API keys in the file, by state: valid, expiring (within a week), expired.",
        "state",
    ),
    # Requests, as their clients' streams saw them. gRPC and HTTP alike.
    _counter(
        "octavo_requests_accepted_total", ROUTER, "Requests that the store has accepted, through this router.", "model"
    ),
    _counter(
        "octavo_requests_ended_total",
        ROUTER,
        "Ends of streams, by reason; `left`: the client had gone, `detached`: this router ended the stream.",
        "model",
        "reason",
    ),
    _counter(
        "octavo_requests_refused_total",
        ROUTER,
        "Requests that were refused before they were accepted, by the reason of the error.",
        "reason",
    ),
    _counter(
        "octavo_requests_attached_total",
        ROUTER,
        "Streams of requests that were accepted before: clients that came back.",
    ),
    _gauge("octavo_streams", ROUTER, "Streams of clients that are open."),
    _counter("octavo_prompt_tokens_total", ROUTER, "Tokens of prompts of requests that have ended.", "model"),
    _counter("octavo_cached_tokens_total", ROUTER, "Of these, tokens that a prefix cache had.", "model"),
    _counter("octavo_output_tokens_total", ROUTER, "Tokens delivered to clients.", "model"),
    _histogram(
        "octavo_queued_seconds", ROUTER, ANSWER_BOUNDS, "From the arrival of a request until a worker has it.", "model"
    ),
    _histogram(
        "octavo_first_token_seconds",
        ROUTER,
        ANSWER_BOUNDS,
        "From the arrival of a request until its first token is sent (TTFT).",
        "model",
    ),
    _histogram(
        "octavo_token_seconds",
        ROUTER,
        TOKEN_BOUNDS,
        "Time between tokens (ITL); of tokens that are sent together, each has its share.",
        "model",
    ),
    _histogram(
        "octavo_request_seconds", ROUTER, ANSWER_BOUNDS, "From the arrival of a request until its end.", "model"
    ),
    # The queue
    _gauge(
        "octavo_queue_requests",
        ROUTER,
        "Requests that wait in the store's queue, by model, over all routers: each says the same.",
        "model",
    ),
    _gauge(
        "octavo_queue_tokens",
        ROUTER,
        "The most tokens that these can come to hold: what autoscaling should look at.",
        "model",
    ),
    _gauge(
        "octavo_waiting_requests", ROUTER, "Streams of this router whose request waits for a worker, by class.", "class"
    ),
    _gauge(
        "octavo_waiting_oldest_seconds",
        ROUTER,
        "How long the one of them that came first has waited, by class.",
        "class",
    ),
    _gauge("octavo_waiting_tenants", ROUTER, "How many tenants these are of."),
    # Tenants of API keys: the first 32 that a router has met have a label of their own
    _gauge("octavo_tenant_streams", ROUTER, "Streams of clients that are open, by tenant.", "tenant"),
    _counter("octavo_tenant_requests_total", ROUTER, "Requests that were accepted, by tenant.", "tenant"),
    _counter(
        "octavo_tenant_tokens_total",
        ROUTER,
        "Tokens of streams that have ended, by tenant and kind: prompt, output.",
        "tenant",
        "kind",
    ),
    _counter(
        "octavo_tenant_refused_total",
        ROUTER,
        "Requests that were refused for what the tenant has under way or waiting, or has used.",
        "tenant",
        "reason",
    ),
    # Placement
    _counter(
        "octavo_takes_total",
        ROUTER,
        "Owners given by this router, by reason: `lease` and `connection` are take-overs from a lost worker.",
        "reason",
    ),
    _counter(
        "octavo_admissions_total", ROUTER, "Answers of workers that this router asked to run a sequence.", "answer"
    ),
    _counter(
        "octavo_numerics_changes_total",
        ROUTER,
        "Requests with output that this router gave to a worker of another class of numerics.",
        "model",
    ),
    _gauge("octavo_workers", ROUTER, "Workers that this router knows, by model and state.", "model", "state"),
    _gauge(
        "octavo_waits_for_workers",
        ROUTER,
        "1 if requests for a model that has no worker wait for one (--wait-for-workers), 0 if they are refused.",
    ),
    _gauge(
        "octavo_kv_index_blocks",
        ROUTER,
        "Different blocks in this router's index of prefix caches, by tier: device, host.",
        "tier",
    ),
    # The step loop
    _gauge("octavo_branches_running", WORKER, "Branches with blocks on the device."),
    _gauge("octavo_sequences", WORKER, "Sequences on this worker."),
    _gauge("octavo_sequences_waiting", WORKER, "Sequences with branches to start."),
    _gauge("octavo_sequences_swapped", WORKER, "Sequences whose blocks are in the host pool."),
    _gauge("octavo_prefill_tokens_waiting", WORKER, "Tokens of prompts and histories that are still to be computed."),
    _counter("octavo_steps_total", WORKER, "Steps."),
    _counter("octavo_steps_failed_total", WORKER, "Steps in which the model raised an error."),
    _counter("octavo_step_tokens_total", WORKER, "Tokens that steps have computed, of prompts and outputs."),
    _counter("octavo_step_phase_seconds_total", WORKER, "Time in steps, by phase: plan, run, commit.", "phase"),
    _histogram("octavo_step_seconds", WORKER, STEP_BOUNDS, "Steps that ran anything."),
    _histogram("octavo_step_branches", WORKER, BATCH_BOUNDS, "Branches that got a token in a step (batch size)."),
    # Blocks
    _gauge("octavo_blocks", WORKER, "Device blocks, by state: free, cached, used.", "state"),
    _gauge("octavo_blocks_all", WORKER, "Device blocks, in whatever state."),
    _gauge(
        "octavo_host_blocks", WORKER, "Host blocks, by state: free (those of demoted prefixes, too), used.", "state"
    ),
    _gauge("octavo_demoted_blocks", WORKER, "Blocks of prefixes with a copy in the host pool."),
    _counter(
        "octavo_prefix_asked_tokens_total",
        WORKER,
        "Tokens of the prompts of sequences that have brought their first token here.",
    ),
    _counter(
        "octavo_prefix_hit_tokens_total",
        WORKER,
        "Of these, tokens that the prefix cache had, on the device or in the host pool.",
    ),
    _counter("octavo_prefix_promoted_tokens_total", WORKER, "Tokens whose blocks were copied back from the host pool."),
    _counter(
        "octavo_prefix_fetched_tokens_total",
        WORKER,
        "Tokens whose blocks were fetched from other workers' prefix caches.",
    ),
    _counter(
        "octavo_preemptions_total",
        WORKER,
        "Sequences that gave their blocks to others, by kind: swap, recompute.",
        "kind",
    ),
    # The journal
    _histogram(
        "octavo_journal_seconds",
        WORKER,
        CALL_BOUNDS,
        "Appends to the journal, each with all that was due, until the store has answered.",
    ),
    _counter("octavo_journal_tokens_total", WORKER, "Tokens that the journal has accepted from this worker."),
    _counter(
        "octavo_journal_fenced_total",
        WORKER,
        "Appends that the store refused, because another worker owns the sequence or it waits.",
    ),
    # Moves
    _counter(
        "octavo_migrations_total",
        WORKER,
        "Migrations from this worker that are over, by outcome: moved, stayed, ended.",
        "outcome",
    ),
    _counter("octavo_migration_bytes_total", WORKER, "Bytes of blocks that migrations have sent from this worker."),
    _histogram(
        "octavo_migration_stall_seconds",
        WORKER,
        STALL_BOUNDS,
        "For how long sequences that moved from this worker were stopped.",
    ),
    _counter("octavo_drains_total", WORKER, "Drains that have begun, the one at the end of the process included."),
    _counter("octavo_released_total", WORKER, "Sequences that this worker has given back to the queue."),
    _gauge("octavo_draining", WORKER, "1 while this worker takes no new sequences because it drains, else 0."),
)

METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _ALL})
