"""Views of a cluster that does not exist, for what shows them."""

from octavo.v1 import admin_pb2, inference_pb2

BOUNDS = (0.01, 0.1, 1.0)


def worker(number, **fields):
    made = admin_pb2.WorkerStatus(
        worker_id=f"worker-{number}",
        incarnation=f"i{number}",
        num_blocks=100,
        num_host_blocks=10,
        available=True,
        model="m",
        device="cpu",
    )
    load = made.load
    load.num_sequences, load.num_waiting = 5, 1
    load.num_used_blocks, load.num_cached_blocks, load.num_free_blocks = 50, 25, 25
    load.step_ms = 12.5
    load.prefix_asked_tokens, load.prefix_hit_tokens = 1000, 250
    made.MergeFrom(admin_pb2.WorkerStatus(**fields))
    return made


def sequence(number, **fields):
    made = admin_pb2.SequenceStatus(
        seq_id=f"s{number}",
        request_id=f"request-{number}",
        state=inference_pb2.REQUEST_STATE_RUNNING,
        owner="i0",
        prompt_tokens=40,
        num_tokens=[100, 20],
        age_ms=7000,
        tenant="acme",
    )
    made.MergeFrom(admin_pb2.SequenceStatus(**fields))
    return made


def view(number=1, *, num_workers=2, num_sequences=4, num_moves=1, **fields):
    """The view of second `number`: 200 tokens are sent in each, and a worker plans for 10 ms and runs for 90 ms."""
    made = admin_pb2.WatchClusterResponse(
        router_id="life-1", router_name="router-0", up_ms=1000 * number, num_streams=9, **fields
    )
    for each in range(num_workers):
        made.workers.append(worker(each))
        load = made.workers[-1].load
        load.step_plan_s, load.step_run_s, load.num_step_tokens = 0.01 * number, 0.09 * number, 300 * number
    made.queue.num_queued, made.queue.queued_tokens, made.queue.num_tenants = 3, 900, 1
    made.queue.tenants.add(tenant="acme", num_queued=3, queued_tokens=900)
    for each in range(num_sequences):
        made.sequences.append(sequence(each))
    for each in range(num_moves):
        made.moves.add(
            seq_id="s0",
            request_id="request-0",
            kind=admin_pb2.MOVE_KIND_MIGRATED,
            from_worker="worker-1",
            to_worker="worker-0",
            age_ms=3000,
            number=each + 1,
        )
    for model in ("m", "other"):
        traffic = made.traffic.add(model=model, num_output_tokens=100 * number)
        for histogram in (traffic.first_token, traffic.between_tokens):
            histogram.bounds_s.extend(BOUNDS)
            histogram.counts.extend([0, 10 * number, 0, 0])
    return made
