"""The table of all metrics: names, kinds, labels and what each one says. Nothing else is exposed.

Labels have few values: a model, a reason, a kind, one of the first tenants. No request, sequence or text
is ever a label.
"""

from collections.abc import Iterator, Mapping
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
_BOUNDS: Mapping[str, tuple[float, ...]] = {
    "ANSWER": ANSWER_BOUNDS,
    "TOKEN": TOKEN_BOUNDS,
    "CALL": CALL_BOUNDS,
    "STEP": STEP_BOUNDS,
    "BATCH": BATCH_BOUNDS,
    "STALL": STALL_BOUNDS,
}


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


# By row: the name, the programs, the bounds of a histogram, and the labels; below it, the help. `_total`: a counter.
_ROWS = """
octavo_build_info both program version
    Always 1. Which program and version this is.
octavo_up_seconds both
    How long this process has been up.
octavo_serving both
    1 if health says SERVING for the program's own service, else 0.
octavo_store_call_seconds both <CALL> function
    Calls of the store's functions that were answered.
octavo_store_errors_total both function
    Calls of the store's functions that failed: no answer, or no memory.
octavo_calls_refused_total both listener reason
    Calls and connections that were refused for who makes them, by listener and reason.
octavo_admin_calls_total both method
    Calls of operators that were let in; the log names who made each.
octavo_api_keys router state
    API keys in the file, by state: valid, expiring (within a week), expired.
# Requests, as their clients' streams saw them. gRPC and HTTP alike.
octavo_requests_accepted_total router model
    Requests that the store has accepted, through this router.
octavo_requests_ended_total router model reason
    Ends of streams, by reason; `left`: the client had gone, `detached`: this router ended the stream.
octavo_requests_refused_total router reason
    Requests that were refused before they were accepted, by the reason of the error.
octavo_requests_attached_total router
    Streams of requests that were accepted before: clients that came back.
octavo_streams router
    Streams of clients that are open.
octavo_prompt_tokens_total router model
    Tokens of prompts of requests that have ended.
octavo_cached_tokens_total router model
    Of these, tokens that a prefix cache had.
octavo_output_tokens_total router model
    Tokens delivered to clients.
octavo_queued_seconds router <ANSWER> model
    From the arrival of a request until a worker has it.
octavo_first_token_seconds router <ANSWER> model
    From the arrival of a request until its first token is sent (TTFT).
octavo_token_seconds router <TOKEN> model
    Time between tokens (ITL); of tokens that are sent together, each has its share.
octavo_request_seconds router <ANSWER> model
    From the arrival of a request until its end.
# Pictures
octavo_pictures_read_total router source
    Pictures that were decoded and resized for prompts, by source: sent (with the request), fetched (by a URL).
octavo_pictures_refused_total router reason
    Requests that were refused for a picture, by reason: model, count, host, fetch, data, file, template.
octavo_picture_bytes worker
    Memory that encoded pictures take.
octavo_picture_hits_total worker
    Pictures of sequences that came here, which were encoded already.
octavo_picture_misses_total worker
    Pictures of sequences that came here, which had to be encoded.
octavo_picture_encode_seconds worker <ANSWER>
    How long pictures were encoded, one at a time.
# The queue
octavo_queue_requests router model
    Requests that wait in the store's queue, by model, over all routers: each says the same.
octavo_queue_tokens router model
    The most tokens that these can come to hold: what autoscaling should look at.
octavo_waiting_requests router class
    Streams of this router whose request waits for a worker, by class.
octavo_waiting_oldest_seconds router class
    How long the one of them that came first has waited, by class.
octavo_waiting_tenants router
    How many tenants these are of.
# Tenants of API keys: the first 32 that a router has met have a label of their own
octavo_tenant_streams router tenant
    Streams of clients that are open, by tenant.
octavo_tenant_requests_total router tenant
    Requests that were accepted, by tenant.
octavo_tenant_tokens_total router tenant kind
    Tokens of streams that have ended, by tenant and kind: prompt, output.
octavo_tenant_refused_total router tenant reason
    Requests that were refused for what the tenant has under way or waiting, or has used.
# Placement
octavo_takes_total router reason
    Owners given by this router, by reason: `lease` and `connection` are take-overs from a lost worker.
octavo_admissions_total router answer
    Answers of workers that this router asked to run a sequence.
octavo_numerics_changes_total router model
    Requests with output that this router gave to a worker of another class of numerics.
octavo_vectors_total router model
    Vectors of prompts (Embed and Score) that this router was given by workers.
octavo_vector_prompts_sent_again_total router model
    Prompts that this router sent to another worker, because one was lost, drained or had no room.
octavo_vector_prompts router
    Prompts whose vectors clients of this router wait for.
octavo_workers router model state
    Workers that this router knows, by model and state.
octavo_waits_for_workers router
    1 if requests for a model that has no worker wait for one (--wait-for-workers), 0 if they are refused.
octavo_kv_index_blocks router tier
    Different blocks in this router's index of prefix caches, by tier: device, host, files.
# The step loop
octavo_branches_running worker
    Branches with blocks on the device.
octavo_sequences worker
    Sequences on this worker.
octavo_sequences_waiting worker
    Sequences with branches to start.
octavo_sequences_swapped worker
    Sequences whose blocks are in the host pool.
octavo_prefill_tokens_waiting worker
    Tokens of prompts and histories that are still to be computed.
octavo_steps_total worker
    Steps.
octavo_steps_failed_total worker
    Steps in which the model raised an error.
octavo_step_tokens_total worker
    Tokens that steps have computed, of prompts and outputs, wrong drafts among them.
octavo_decodes_total worker
    How often a step has brought a branch its next token. Each brings one more for each draft that is drawn.
octavo_drafts_total worker drafter
    Tokens that were guessed, by drafter: forced, lookup, recent, model.
octavo_drafts_accepted_total worker drafter
    Of these, tokens that the model drew, too.
octavo_step_phase_seconds_total worker phase
    Time in steps, by phase: plan, run, commit.
octavo_step_seconds worker <STEP>
    Steps that ran anything.
octavo_step_branches worker <BATCH>
    Branches that got a token in a step (batch size).
# Ranks of a group
octavo_rank_memory_bytes worker rank
    Memory that a rank uses, shared with others or not.
octavo_rank_cpu_seconds_total worker rank
    Time of processors that a rank has used.
octavo_rank_wait_seconds_total worker rank
    Time that a rank has waited for others within steps: the slowest one waits least.
octavo_rank_silent_seconds worker rank
    Time since a rank has last said that it lives.
# Blocks
octavo_blocks worker state
    Device blocks, by state: free, cached, used.
octavo_blocks_all worker
    Device blocks, in whatever state.
octavo_host_blocks worker state
    Host blocks, by state: free (those of demoted prefixes, too), used.
octavo_demoted_blocks worker
    Blocks of prefixes with a copy in the host pool.
octavo_adapter_bytes worker
    Memory that low-rank adapters take.
octavo_adapter_loads_total worker
    Adapters that were read into memory.
octavo_prefix_asked_tokens_total worker
    Tokens of the prompts of sequences that have brought their first token here.
octavo_prefix_hit_tokens_total worker
    Of these, tokens that the prefix cache had, on the device or in the host pool.
octavo_prefix_kept_blocks worker
    Blocks of named prefixes that are on the device, and evicted last.
octavo_prefix_promoted_tokens_total worker
    Tokens whose blocks were copied back from the host pool.
octavo_prefix_fetched_tokens_total worker
    Tokens whose blocks were fetched from other workers' prefix caches.
octavo_preemptions_total worker kind
    Sequences that gave their blocks to others, by kind: swap, recompute.
# The journal
octavo_journal_seconds worker <CALL>
    Appends to the journal, each with all that was due, until the store has answered.
octavo_journal_tokens_total worker
    Tokens that the journal has accepted from this worker.
octavo_journal_fenced_total worker
    Appends that the store refused, because another worker owns the sequence or it waits.
# Moves
octavo_migrations_total worker outcome
    Migrations from this worker that are over, by outcome: moved, stayed, ended.
octavo_migration_bytes_total worker
    Bytes of blocks that migrations have sent from this worker.
octavo_migration_stall_seconds worker <STALL>
    For how long sequences that moved from this worker were stopped.
octavo_standby_sequences worker
    Sequences here of which another worker, their buddy, keeps blocks in case that this one dies.
octavo_standby_tokens worker state
    Tokens of long sequences here, in full blocks, by state: held (their buddies have them), behind (not yet).
octavo_standby_failed_total worker
    Calls to buddies that were refused or not answered.
octavo_standby_kept_blocks worker
    Blocks that are to be kept here for sequences of other workers.
octavo_standby_refused_total worker
    Histories of other workers' sequences for which there was no room here.
octavo_standby_fetched_tokens_total worker
    Tokens whose blocks were fetched for sequences of other workers.
octavo_disk_bytes worker
    Bytes of the files of the disk tier, by the last count and what this worker has written since.
octavo_disk_written_tokens_total worker
    Tokens whose blocks this worker has written to files.
octavo_disk_read_tokens_total worker
    Tokens whose blocks came from files, and were not computed.
octavo_disk_failures_total worker problem
    Files that were removed because they were not whole (damaged), and turns that the disk has refused (refused).
octavo_drains_total worker
    Drains that have begun, the one at the end of the process included.
octavo_released_total worker
    Sequences that this worker has given back to the queue.
octavo_draining worker
    1 while this worker takes no new sequences because it drains, else 0.
"""


def _parsed(rows: str) -> Iterator[Metric]:
    lines = [line for line in rows.splitlines() if line and not line.startswith("#")]
    for row, help in zip(lines[::2], lines[1::2], strict=True):
        name, program, *labels = row.split()
        bounds = _BOUNDS[labels.pop(0).strip("<>")] if "<" in row else ()
        kind = MetricKind.COUNTER if name.endswith("_total") else MetricKind.GAUGE
        programs = BOTH if program == "both" else (program,)
        yield Metric(name, MetricKind.HISTOGRAM if bounds else kind, programs, help.strip(), tuple(labels), bounds)


METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _parsed(_ROWS)})
