"""What a router costs per token, against a bare grpc.aio server that echoes the same messages.

    python tests/bench/relay.py [--streams 48] [--tokens 200] [--rounds 3]

Both are measured in processor seconds of the server process, interleaved, so other load on the machine matters little.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import psutil

from octavo.client import AsyncClient
from octavo.errors import ServingError
from octavo.sampling import SamplingParams
from octavo.store.embedded import EmbeddedStore
from octavo.v1 import inference_pb2

ROUTER, WORKER, ECHO = "127.0.0.1:50951", "127.0.0.1:50961", "127.0.0.1:50971"
PATH = "/octavo.bench.Echo/Echo"


async def serve_echo() -> None:
    """The least a gRPC server in Python can do: read a message, write it."""

    async def echo(requests: AsyncIterator[object], context: object) -> AsyncIterator[object]:
        async for request in requests:
            yield request

    handler = grpc.stream_stream_rpc_method_handler(
        echo, inference_pb2.GenerateEvent.FromString, inference_pb2.GenerateEvent.SerializeToString
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("octavo.bench.Echo", {"Echo": handler}),))
    server.add_insecure_port(ECHO)
    await server.start()
    await server.wait_for_termination()


def main_echo() -> None:
    import uvloop

    uvloop.run(serve_echo())


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def relay_round(client: AsyncClient, router: psutil.Process, streams: int, tokens: int) -> tuple[float, list]:
    """(tokens per processor second of the router, the events of one stream)"""
    events: list[object] = []

    async def one(i: int) -> int:
        count = 0
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        async for event in client.generate([1, 2, 3, i + 10], params):
            count += len(event.token_ids)
            if i == 0:
                events.append(event)
        return count

    before = cpu(router)
    counts = await asyncio.gather(*(one(i) for i in range(streams)))
    return sum(counts) / (cpu(router) - before), events


async def echo_round(echo: psutil.Process, messages: list[bytes], streams: int) -> float:
    """Messages per processor second of the echo server."""
    async with grpc.aio.insecure_channel(ECHO) as channel:
        call_of = channel.stream_stream(PATH, request_serializer=bytes, response_deserializer=bytes)

        async def one() -> None:
            call = call_of()
            for message in messages:
                await call.write(message)
                await call.read()
            await call.done_writing()

        await one()
        before = cpu(echo)
        await asyncio.gather(*(one() for _ in range(streams)))
        return streams * len(messages) / (cpu(echo) - before)


async def until_ready(client: AsyncClient) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            await client.complete([1, 2], SamplingParams(temperature=0, max_tokens=1))
            return
        except ServingError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.2)


def wire_events(tokens: int) -> list[bytes]:
    """Messages as a router sends them: one token, a little text, a resume token."""
    return [
        inference_pb2.GenerateEvent(
            request_id="r-" + "0" * 32, first_index=i, token_ids=[500 + i], text=" word", resume_token=bytes(69)
        ).SerializeToString()
        for i in range(tokens)
    ]


async def main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = EmbeddedStore(Path(folder))
        await store.start()
        common = ["--store", store.url, "--log-level", "warning"]
        router = [sys.executable, "-m", "router", "--listen", ROUTER, "--admin-listen", "", *common]
        worker = [sys.executable, "-m", "gpu_worker", "--listen", WORKER, "--runner", "fake", *common]
        processes = [
            subprocess.Popen(command)
            for command in (router, [*worker, "--step-delay-ms", str(args.step_ms)], [sys.executable, __file__, "--echo"])
        ]
        try:
            async with AsyncClient(ROUTER) as client:
                await until_ready(client)
                relays, echoes = [], []
                for _ in range(args.rounds):
                    relay, _ = await relay_round(client, psutil.Process(processes[0].pid), args.streams, args.tokens)
                    relays.append(relay)
                    echo = psutil.Process(processes[2].pid)
                    echoes.append(await echo_round(echo, wire_events(args.tokens), args.streams))
            relay, echo = statistics.median(relays), statistics.median(echoes)
            print(f"{args.streams} streams, load average {os.getloadavg()[0]:.1f}")
            print(f"router: {relay:8.0f} tokens per processor second   {[round(r) for r in relays]}")
            print(f"echo:   {echo:8.0f} messages per processor second {[round(e) for e in echoes]}")
            print(f"ratio:  {relay / echo:8.2f}")
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()
            await store.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=10)
    parser.add_argument("--echo", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.echo:
        main_echo()
    else:
        asyncio.run(main(options))
