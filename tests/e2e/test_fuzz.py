"""Mutated requests at the live service, over the wire: documented codes, then business as usual.

OCTAVO_TEST_FUZZ is the number of requests (170; 30000 in `make test-long`), OCTAVO_TEST_SEED where the random numbers
begin.
"""

import asyncio
import collections
import contextlib
import os
import random
import re

import grpc
import pytest
from effort import draws

from octavo.client import SamplingParams
from octavo.internal.v1 import worker_pb2
from octavo.v1 import inference_pb2, types_pb2
from octavo.wire.channel import open_channel
from octavo.wire.public import sampling_to_wire

NUM_REQUESTS = int(os.environ.get("OCTAVO_TEST_FUZZ", draws(170, 30_000)))
SEED = int(os.environ.get("OCTAVO_TEST_SEED", "20261121"))
AT_ONCE = 32
Code = grpc.StatusCode
ALLOWED = {
    *(Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.ALREADY_EXISTS, Code.FAILED_PRECONDITION),
    *(Code.RESOURCE_EXHAUSTED, Code.DEADLINE_EXCEEDED, Code.DATA_LOSS),
}
SPECIAL = [0, 1, 2, 127, 128, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
METHODS = ("Complete", "Generate", "Attach", "Get", "Cancel", "Tokenize", "Detokenize")


def valid(rng):
    """A request that is served, with every kind of field in it; at most a few tokens long."""
    request = inference_pb2.GenerateRequest(text="some text", priority=rng.randrange(5))
    if rng.random() < 0.3:
        request.request_id = f"fuzz-{rng.randrange(50)}"
    if rng.random() < 0.3:
        request.token_ids.ids.extend(rng.randrange(1, 1000) for _ in range(rng.randrange(1, 50)))
    sampling = request.sampling
    sampling.max_tokens = rng.randrange(1, 5)
    chance = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "n": 2,
        "best_of": 3,
        "seed": 7,
        "logprobs": 2,
    }
    for name, value in {**chance, "prompt_logprobs": 1, "repetition_penalty": 1.1, "min_tokens": 1}.items():
        if rng.random() < 0.2:
            setattr(sampling, name, value)
    if rng.random() < 0.3:
        sampling.stop.extend(["stop", "ü"])
        sampling.logit_bias[5] = 1.5
    if rng.random() < 0.1:
        sampling.CopyFrom(types_pb2.SamplingParams(beam_width=3, n=2, max_tokens=4))
    return request


def mutated(data, rng):
    """Flips, cuts, repeats and inserts; sometimes nothing."""
    data = bytearray(data)
    for _ in range(rng.choice([0, 1, 1, 2, 8])):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + rng.randrange(1, 5)]
            case 2:
                data[at:at] = data[at : at + rng.randrange(1, 9)]
            case 3:
                data[at:at] = rng.randbytes(rng.randrange(1, 5))
            case _ if at < len(data):
                data[at] = rng.randrange(256)
    return bytes(data)


def inference_request(rng):
    method = rng.choice(METHODS[:2] * 4 + METHODS[2:])
    request_id = f"fuzz-{rng.randrange(50)}"
    fields = {
        "Attach": {"request_id": request_id, "next_indexes": [rng.randrange(3)]},
        "Get": {"request_id": request_id},
        "Cancel": {"request_id": request_id},
        "Tokenize": {"text": "some text"},
        "Detokenize": {"token_ids": [1, 2, 300]},
    }.get(method)
    message = valid(rng) if fields is None else getattr(inference_pb2, f"{method}Request")(**fields)
    return f"/octavo.v1.Inference/{method}", mutated(message.SerializeToString(), rng)


def worker_request(rng):
    """Fields at random, so that most parse and many are half right."""

    def number():
        return rng.choice([rng.randrange(5), rng.choice(SPECIAL[:-2])])

    def seq_id():
        return rng.choice([f"{rng.randrange(30):032x}", "", "zz", "0" * 33])

    match rng.randrange(3):
        case 0:
            request = worker_pb2.ScheduleRequest(router_id=rng.choice(["", "x"]))
            for _ in range(rng.randrange(4)):
                params = SamplingParams(max_tokens=rng.randrange(1, 40), seed=1, n=rng.choice([1, 1, 2]))
                item = request.admissions.add(seq_id=seq_id(), epoch=number(), priority=rng.randrange(6))
                item.sampling.CopyFrom(sampling_to_wire(params))
                item.prompt.ids.extend(min(number(), 2**32 - 1) for _ in range(rng.randrange(4)))
                item.deadline_in_ms, item.alone = number(), rng.random() < 0.3
                if rng.random() < 0.3:
                    item.outputs.add(ids=[1, 2])
                    item.finished_branches.append(rng.randrange(3))
            method = "Schedule"
        case 1:
            request, method = worker_pb2.SwapRequest(), "Swap"
            for _ in range(rng.randrange(4)):
                request.items.add(seq_id=seq_id(), epoch=number(), operation=rng.randrange(6))
        case _:
            request, method = worker_pb2.WorkerCancelRequest(), "Cancel"
            for _ in range(rng.randrange(4)):
                request.sequences.add(seq_id=seq_id(), epoch=number())
    data = request.SerializeToString()
    return f"/octavo.internal.v1.Worker/{method}", mutated(data, rng) if rng.random() < 0.3 else data


def step_commands(rng):
    """A stream of commands. What cannot be parsed is not among them: gRPC itself ends such a stream."""
    seq_id = f"{rng.randrange(30):032x}"
    command = [
        lambda: worker_pb2.StepRequest(),
        lambda: worker_pb2.StepRequest(open=worker_pb2.Open(router_id=rng.choice(["", "a", "b" * 300]))),
        lambda: worker_pb2.StepRequest(grant=worker_pb2.Grant(steps=rng.choice([1, 2, 5]))),
        lambda: worker_pb2.StepRequest(pause=worker_pb2.Pause()),
        lambda: worker_pb2.StepRequest(follow=worker_pb2.Follow(seq_id=seq_id, next_indexes=[rng.choice(SPECIAL[:8])])),
        lambda: worker_pb2.StepRequest(unfollow=worker_pb2.Unfollow(seq_id=seq_id)),
    ]
    return [rng.choice(command)() for _ in range(rng.randrange(1, 6))]


async def send(channel, method, data, timeout=2.0):
    call = channel.unary_stream(method)(data, timeout=timeout)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError:
        pass
    return await call.code(), await call.details()


async def flood(count, one):
    """`count` calls of one(), AT_ONCE side by side; the codes they ended with."""
    codes, left = collections.Counter(), iter(range(count))

    async def call():
        for _ in left:
            what, code, details = await one()
            codes[code.name] += 1
            assert code in ALLOWED, f"{what}: {code} {details}"

    await asyncio.gather(*(call() for _ in range(AT_ONCE)))
    print(f"OCTAVO_TEST_SEED={SEED}: {dict(codes)}")
    return codes


@pytest.mark.scaled
@pytest.mark.timeout(3600)
async def test_mutated_requests_at_a_router(cluster, client, oracle):
    rng = random.Random(SEED)
    async with open_channel(cluster.endpoints[0]) as channel:

        async def one():
            method, data = inference_request(rng)
            return (method, data), *await send(channel, method, data)

        codes = await flood(NUM_REQUESTS * 2 // 3, one)
    assert codes["OK"] > NUM_REQUESTS // 20
    assert codes["INVALID_ARGUMENT"] > NUM_REQUESTS // 20
    done = await client.complete([1, 2, 3], SamplingParams(temperature=0, max_tokens=20))
    assert list(done.token_ids) == oracle.tokens([1, 2, 3], 20)
    assert not [name for name, p in cluster.processes.items() if re.search("error|Traceback", p.log.read_text())]


@pytest.mark.scaled
@pytest.mark.timeout(3600)
async def test_random_commands_at_a_worker(solo):
    rng = random.Random(SEED)
    endpoint = solo.worker_endpoints["w0"]
    async with open_channel(endpoint, internal=True) as channel:

        def step(commands, timeout):
            """By a blocking call: the other kind reports INTERNAL by itself when a stream ends while it writes."""
            call = solo.worker("w0").Step(iter(commands), timeout=timeout)
            with contextlib.suppress(grpc.RpcError):
                list(call)
            return call.code(), call.details()

        async def one():
            if rng.random() < 0.3:
                commands = step_commands(rng)
                paused = any(command.HasField("pause") for command in commands)
                return commands, *await asyncio.to_thread(step, commands, 0.3 if paused else 5.0)
            method, data = worker_request(rng)
            return (method, data), *await send(channel, method, data)

        await flood(NUM_REQUESTS // 3, one)
        worker = solo.worker("w0")
        everything = [worker_pb2.SequenceEpoch(seq_id=f"{n:032x}", epoch=2**64 - 1) for n in range(30)]
        worker.Cancel(worker_pb2.WorkerCancelRequest(sequences=everything))
        assert len(list(worker.Step(iter([worker_pb2.StepRequest(grant=worker_pb2.Grant(steps=3))]), timeout=20))) == 3
        assert not re.search("error|Traceback", solo.processes["w0"].log.read_text())
