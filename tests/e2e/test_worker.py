"""A worker by hand, as with grpcurl: schedule, step by step, swap, cancel; no router anywhere."""

import time

import grpc
import pytest

from octavo.client import SamplingParams
from octavo.internal.v1 import worker_pb2
from octavo.request import errors, hashing
from octavo.v1 import inference_pb2
from octavo.wire import statuses
from octavo.wire.public import sampling_bytes

SEQ = "%032x"


@pytest.fixture
def worker(solo):
    """A stub; whatever a test has left on the worker is cancelled."""
    stub = solo.worker("w0")
    yield stub
    everything = [worker_pb2.SequenceEpoch(seq_id=SEQ % number, epoch=99) for number in range(20)]
    stub.Cancel(worker_pb2.WorkerCancelRequest(sequences=everything))
    steps(stub, 3)


def steps(stub, count, *before):
    """Runs exactly that many steps and returns their results."""
    grant = worker_pb2.StepRequest(grant=worker_pb2.Grant(steps=count))
    return list(stub.Step(iter([*before, grant]), timeout=30))


def admission(number=1, prompt=(1, 2, 3), max_tokens=10, **more):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, best_of=1, seed=0)
    item = worker_pb2.Admission(seq_id=SEQ % number, epoch=1, sampling=sampling_bytes(params), priority=3)
    item.prompt.ids.extend(prompt)
    for name, value in more.items():
        setattr(item, name, value)
    return item


def schedule(stub, *admissions):
    return list(stub.Schedule(worker_pb2.ScheduleRequest(admissions=admissions)).results)


def test_an_idle_worker_runs_the_one_step_it_is_granted(solo, worker):
    before = solo.load("w0").num_steps
    for count in (1, 1, 3):
        results = steps(worker, count)
        assert len(results) == count
        assert all(not result.items and not result.num_tokens for result in results)
        before += count
        assert solo.load("w0").num_steps == before


def test_schedule_answers_each_item_for_itself(worker, solo):
    before = solo.load("w0").num_steps
    results = schedule(
        worker,
        admission(1),
        admission(2, prompt=[]),
        admission(3, prompt=[999_999]),
        admission(4, prompt=[1], max_tokens=0),
        admission(1),
        admission(5, epoch=0),
        worker_pb2.Admission(seq_id="not hex"),
        admission(6, priority=77),
    )
    outcome = worker_pb2.AdmissionOutcome.Name
    names = [outcome(result.outcome).removeprefix("ADMISSION_OUTCOME_") for result in results]
    assert names == ["ADMITTED", *["REJECTED"] * 3, "ADMITTED", *["REJECTED"] * 3]
    assert [result.failure.message.split(":")[0] for result in results] == [
        *("", "prompt", "prompt", "max_tokens", "", "epoch", "seq_id", "priority")
    ]
    stale = schedule(worker, admission(1, epoch=5))[0]  # the store is asked from epoch 2 on, and knows of no such owner
    assert stale.outcome == worker_pb2.ADMISSION_OUTCOME_STALE_EPOCH
    assert "does not own it at epoch 5" in stale.failure.message
    assert solo.load("w0").num_steps == before  # nothing runs ungranted
    assert len(schedule(worker, *[admission(7)] * 1024)) == 1024
    with pytest.raises(grpc.RpcError) as raised:
        schedule(worker, *[admission(7)] * 1025)
    assert isinstance(statuses.error_from(raised.value), errors.InvalidArgument)


def test_a_step_after_a_schedule_runs_it(worker, solo):
    """Four steps of 64 tokens for a prompt of 200, then the store, which has no record of it, has it dropped."""
    assert schedule(worker, admission(1, prompt=[7] * 200))[0].outcome == worker_pb2.ADMISSION_OUTCOME_ADMITTED
    assert solo.load("w0").num_sequences == 1
    results = [steps(worker, 1)[0] for _ in range(4)]
    assert [result.num_tokens for result in results] == [64, 64, 64, 8]
    assert len({result.step_id for result in results}) == 4


def test_swap_out_in_and_drop(worker, solo):
    assert schedule(worker, admission(1, prompt=range(1, 100)))[0].outcome == worker_pb2.ADMISSION_OUTCOME_ADMITTED
    steps(worker, 1)

    def swap(operation, number=1, epoch=1):
        item = worker_pb2.SwapItem(seq_id=SEQ % number, epoch=epoch, operation=operation)
        return worker.Swap(worker_pb2.SwapRequest(items=[item])).results[0]

    used = solo.load("w0").num_used_blocks
    assert used >= 4
    out = swap(worker_pb2.SWAP_OPERATION_OUT)
    assert out.num_blocks == used, out
    steps(worker, 1)
    back = swap(worker_pb2.SWAP_OPERATION_IN)
    assert not back.HasField("failure"), back
    dropped = swap(worker_pb2.SWAP_OPERATION_DROP)
    assert not dropped.HasField("failure")
    assert swap(worker_pb2.SWAP_OPERATION_DROP).num_blocks == 0  # already there
    assert solo.load("w0").num_used_blocks == 0
    assert swap(worker_pb2.SWAP_OPERATION_OUT, number=9).failure.reason == "NOT_FOUND"
    assert swap(worker_pb2.SWAP_OPERATION_OUT, epoch=2).failure.reason == "STALE_EPOCH"
    assert swap(0).failure.reason == "INVALID_ARGUMENT"
    with pytest.raises(grpc.RpcError) as raised:
        worker.Swap(worker_pb2.SwapRequest(items=[worker_pb2.SwapItem()] * 1025))
    assert isinstance(statuses.error_from(raised.value), errors.InvalidArgument)


def test_bad_commands_end_the_stream_alone(worker, solo):
    with pytest.raises(grpc.RpcError) as raised:
        steps(worker, 1, worker_pb2.StepRequest())
    assert isinstance(statuses.error_from(raised.value), errors.InvalidArgument)
    unknown = worker_pb2.StepRequest(follow=worker_pb2.Follow(seq_id=SEQ % 5))
    assert SEQ % 5 in [seq_id for result in steps(worker, 1, unknown) for seq_id in result.unknown_seq_ids]
    assert steps(worker, 1)


def test_items_carry_what_the_oracle_says(cluster, oracle):
    """A second stream, without Open, sees everything that a router's sequences bring, with its chain."""
    prompt = list(range(100, 120))
    request = inference_pb2.GenerateRequest(request_id="watched")
    request.token_ids.ids.extend(prompt)
    request.sampling.max_tokens, request.sampling.temperature = 40, 0
    observers = [cluster.worker(name).Step(hold_open()) for name in cluster.worker_endpoints]
    cluster.inference().Complete(request)
    tokens, chain = [], hashing.prompt_chain(prompt)
    for observer in observers:
        try:
            for result in observer:
                for item in result.items:
                    tokens += item.token_ids
                    chain = hashing.extend_chain(chain, item.token_ids)
                    assert item.chain == chain
                if len(tokens) == 40:
                    break
        except grpc.RpcError:
            pass  # the other worker ran it
        observer.cancel()
    assert tokens == oracle.tokens(prompt, 40)


def hold_open():
    yield worker_pb2.StepRequest(grant=worker_pb2.Grant(steps=0))
    time.sleep(3)
