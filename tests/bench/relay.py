"""What a router costs per token, beside the router of another checkout.

    python tests/bench/relay.py [--streams 256] [--step-ms 8] [--seconds 5] [--rounds 3] [--against CHECKOUT]

A scripted worker makes a token for every stream in each step, one message a step, and the store is in the router's
memory: the router's processor seconds are spent on the relay alone. All sides are measured in turns, so other load on
the machine matters little. Short requests come while the streams run: their times to the first token are measured, too.
CHECKOUT has its own .venv.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc
import psutil
from _scripted_worker import ScriptedWorker
from _service import describe_machine, free_port, processor_seconds, quantile

from octavo.request.ids import Incarnation, new_incarnation
from octavo.v1 import inference_pb2, inference_pb2_grpc

PROBE_INTERVAL_S = 0.05
BEGINNING = 32  # streams at once
LEASE_MS = 60_000
WARM_S = 0.5
ROUTER_NICE = 5  # on a busy machine routers get less of it than clients and workers, so that the router is what is slow
MAX_TOKENS = 16_384  # of a stream; more than a round takes


async def serve_router(port: int, incarnation: Incarnation, endpoint: str) -> None:
    """A router with a store of its own, in which a worker has a lease."""
    from octavo.settings.router import RouterSettings
    from octavo.store.calls import Member
    from octavo.store.memory import MemoryState, MemoryStore
    from router.router import Router

    store = MemoryStore(MemoryState())
    info = json.dumps({"worker_id": "scripted", "endpoint": endpoint, "lease_ms": LEASE_MS}).encode()
    member = Member("worker", incarnation, info, "scripted", endpoint)
    await store.register(member, LEASE_MS)
    nowhere = {"admin_listen": "", "http_listen": "", "web_listen": ""}
    settings = RouterSettings(listen=f"127.0.0.1:{port}", lease_ms=LEASE_MS, grace_ms=60_000, **nowhere)
    await Router(settings, store, b"s" * 32, new_incarnation()).start()
    while True:
        await asyncio.sleep(1)
        await store.heartbeat(member, LEASE_MS)


def main_serve(what: str, port: int, *more: str) -> None:
    import uvloop

    if what == "worker":
        uvloop.run(ScriptedWorker(more[0], float(more[1]), int(more[2])).serve(port))
        return
    os.nice(ROUTER_NICE)
    uvloop.run(serve_router(port, Incarnation(more[0]), more[1]))


@dataclass
class RelayRound:
    """What the streams have seen in the seconds that were measured, and what that has cost."""

    num_tokens: int = 0
    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)  # seconds between events of a stream, all streams
    first_tokens: list[float] = field(default_factory=list)  # seconds, of the short requests beside them
    router_us: float = 0.0  # processor microseconds per token
    worker_us: float = 0.0
    clients_us: float = 0.0

    def note_event(self, num_tokens: int, gap: float) -> None:
        self.num_tokens += num_tokens
        self.gaps.append(gap)


@dataclass
class Side:
    """A router and its worker."""

    router: psutil.Process
    worker: psutil.Process
    target: str


@asynccontextmanager
async def open_side(python: str, step_s: float, num_streams: int) -> AsyncIterator[Side]:
    incarnation, ports = new_incarnation(), [free_port(), free_port()]
    commands = [
        ("worker", str(ports[0]), incarnation, str(step_s), str(num_streams)),
        ("router", str(ports[1]), incarnation, f"127.0.0.1:{ports[0]}"),
    ]
    processes = [await asyncio.create_subprocess_exec(python, __file__, "--serve", *each) for each in commands]
    try:
        target = f"127.0.0.1:{ports[1]}"
        async with grpc.aio.insecure_channel(target) as channel:
            stub, ready = inference_pb2_grpc.InferenceStub(channel), False
            while not ready:
                try:
                    await stub.ListModels(inference_pb2.ListModelsRequest(), wait_for_ready=True)
                    ready = True
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.2)
        worker, router = (psutil.Process(each.pid) for each in processes)
        yield Side(router, worker, target)
    finally:
        for process in reversed(processes):
            process.kill()
            await process.wait()


def request_of(request_id: str, num_tokens: int) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(request_id=request_id, text=request_id)
    request.sampling.max_tokens, request.sampling.temperature, request.sampling.ignore_eos = num_tokens, 0, True
    return request


async def stream(
    stub: inference_pb2_grpc.InferenceStub, request: inference_pb2.GenerateRequest, on_tokens: Callable[[int], None]
) -> None:
    call = stub.Generate(request)
    while (event := await call.read()) is not grpc.aio.EOF:
        if event.token_ids:
            on_tokens(len(event.token_ids))


class StreamListener:
    """Hears the tokens of one stream, and tells the round that is measured, if one is."""

    def __init__(self, measured: list[RelayRound]) -> None:
        self.begun = asyncio.Event()
        self._measured = measured
        self._last = 0.0

    def __call__(self, num_tokens: int) -> None:
        now = time.perf_counter()
        if self._measured:
            self._measured[0].note_event(num_tokens, now - self._last)
        self._last = now
        self.begun.set()


async def probe(stub: inference_pb2_grpc.InferenceStub, name: str, result: RelayRound) -> None:
    """Sends short requests, one after the other, until cancelled."""
    for number in itertools.count():
        began = time.perf_counter()
        await stream(stub, request_of(f"{name}-probe-{number}", 1), lambda _: None)
        result.first_tokens.append(time.perf_counter() - began)
        await asyncio.sleep(PROBE_INTERVAL_S)


async def relay_round(side: Side, num_streams: int, seconds: float, name: str) -> RelayRound:
    """Begins all streams, measures for some seconds, and leaves them."""
    measured: list[RelayRound] = []
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        grpc.aio.insecure_channel(side.target, options=options) as channel,
        grpc.aio.insecure_channel(side.target, options=options) as other,
    ):
        stub, result = inference_pb2_grpc.InferenceStub(channel), RelayRound()
        listeners = [StreamListener(measured) for _ in range(num_streams)]
        tasks: list[asyncio.Task[None]] = []
        for number, listener in enumerate(listeners):
            request = request_of(f"{name}-{number}", MAX_TOKENS)
            tasks.append(asyncio.create_task(stream(stub, request, listener)))
            if len(tasks) % BEGINNING == 0 or listener is listeners[-1]:
                begun = asyncio.gather(*(each.begun.wait() for each in listeners[: len(tasks)]))
                await asyncio.wait([begun, *tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
        tasks.append(asyncio.create_task(probe(inference_pb2_grpc.InferenceStub(other), name, result)))
        await asyncio.sleep(WARM_S)
        processes = (side.router, side.worker, psutil.Process())
        before, began = [processor_seconds(each) for each in processes], time.perf_counter()
        measured.append(result)
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        measured.clear()
        result.seconds = time.perf_counter() - began
        spent = [processor_seconds(each) - at for each, at in zip(processes, before, strict=True)]
        result.router_us, result.worker_us, result.clients_us = (1e6 * each / result.num_tokens for each in spent)
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return result


FIGURES: dict[str, Callable[[RelayRound], float]] = {
    "tokens per core-second of the router": lambda each: 1e6 / each.router_us,
    "processor µs of the worker per token": lambda each: each.worker_us,
    "processor µs of the clients per token": lambda each: each.clients_us,
    "tokens/s": lambda each: each.num_tokens / each.seconds,
    "tokens per event": lambda each: each.num_tokens / len(each.gaps),
    "time between events, p50, ms": lambda each: 1000 * quantile(each.gaps, 0.5),
    "time between events, p99, ms": lambda each: 1000 * quantile(each.gaps, 0.99),
    "TTFT p50, ms": lambda each: 1000 * quantile(each.first_tokens, 0.5),
    "TTFT p99, ms": lambda each: 1000 * quantile(each.first_tokens, 0.99),
}


async def main(args: argparse.Namespace) -> None:
    print(describe_machine())
    pythons = {"octavo": sys.executable}
    if args.against:
        pythons["against"] = f"{args.against}/.venv/bin/python"
    rounds: dict[str, list[RelayRound]] = {name: [] for name in pythons}
    async with AsyncExitStack() as stack:
        sides = {
            name: await stack.enter_async_context(open_side(python, args.step_ms / 1000, args.streams))
            for name, python in pythons.items()
        }
        for number in range(args.rounds):
            for name in sorted(sides, reverse=bool(number % 2)):
                each = await relay_round(sides[name], args.streams, args.seconds, f"{name}-{number}")
                rounds[name].append(each)
                figure = f"{1e6 / each.router_us:7.0f} tokens per core-second"
                print(f"{name:8} {figure}, load {os.getloadavg()[0]:.1f}", flush=True)
    print(f"medians of {args.rounds} rounds at {args.streams} streams")
    for what, figure in FIGURES.items():
        values = [[figure(each) for each in side] for side in rounds.values()]
        medians = "   ".join(
            f"{name} {statistics.median(side):9.1f}" for name, side in zip(rounds, values, strict=True)
        )
        ratios = [ours / theirs for ours, theirs in zip(*values, strict=True)] if args.against else []
        ratio = f"   ratio {statistics.median(ratios):.2f} {[round(each, 2) for each in ratios]}" if ratios else ""
        print(f"{what:48} {medians}{ratio}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=8, help="shorter than the router needs: it is to be busy")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long a round is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", help="another checkout, measured in turns")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        main_serve(options.serve[0], int(options.serve[1]), *options.serve[2:])
    else:
        asyncio.run(main(options))
