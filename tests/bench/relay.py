"""What a router costs per token, against a bare grpc.aio server that echoes the same messages.

    python tests/bench/relay.py [--streams 48] [--tokens 200] [--rounds 3]

Both are measured in processor seconds of the server process, interleaved, so other load on the machine matters little.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import AsyncIterator

import grpc
import psutil
from _service import Service, describe_machine, free_port, load, processor_seconds, service

from octavo.v1 import inference_pb2

PATH = "/octavo.bench.Echo/Echo"


async def serve_echo(port: int) -> None:
    """The least a gRPC server in Python can do: read a message, write it."""

    async def echo(requests: AsyncIterator[object], context: object) -> AsyncIterator[object]:
        async for request in requests:
            yield request

    handler = grpc.stream_stream_rpc_method_handler(
        echo, inference_pb2.GenerateEvent.FromString, inference_pb2.GenerateEvent.SerializeToString
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("octavo.bench.Echo", {"Echo": handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def main_echo(port: int) -> None:
    import uvloop

    uvloop.run(serve_echo(port))


async def relay_round(service: Service, streams: int, tokens: int) -> float:
    """Tokens per processor second of the router."""
    before = processor_seconds(service.router)
    result = await load(service.client, [[1, 2, 3, i + 10] for i in range(streams)], tokens)
    return result.num_tokens / (processor_seconds(service.router) - before)


async def echo_round(echo: psutil.Process, port: int, messages: list[bytes], streams: int) -> float:
    """Messages per processor second of the echo server."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call_of = channel.stream_stream(PATH, request_serializer=bytes, response_deserializer=bytes)

        async def one() -> None:
            call = call_of()
            for message in messages:
                await call.write(message)
                await call.read()
            await call.done_writing()

        await one()
        before = processor_seconds(echo)
        await asyncio.gather(*(one() for _ in range(streams)))
        return streams * len(messages) / (processor_seconds(echo) - before)


def wire_events(tokens: int) -> list[bytes]:
    """Messages as a router sends them: one token, a little text, a resume token."""
    return [
        inference_pb2.GenerateEvent(
            request_id="r-" + "0" * 32, first_index=i, token_ids=[500 + i], text=" word", resume_token=bytes(69)
        ).SerializeToString()
        for i in range(tokens)
    ]


async def main(args: argparse.Namespace) -> None:
    print(describe_machine())
    port = free_port()
    echo = psutil.Process((await asyncio.create_subprocess_exec(sys.executable, __file__, "--echo", str(port))).pid)
    try:
        async with service("--runner", "fake", "--step-delay-ms", str(args.step_ms)) as running:
            relays, echoes = [], []
            for _ in range(args.rounds):
                relays.append(await relay_round(running, args.streams, args.tokens))
                echoes.append(await echo_round(echo, port, wire_events(args.tokens), args.streams))
    finally:
        echo.terminate()
    relayed, echoed = statistics.median(relays), statistics.median(echoes)
    print(f"router: {relayed:8.0f} tokens per processor second   {[round(r) for r in relays]}")
    print(f"echo:   {echoed:8.0f} messages per processor second {[round(e) for e in echoes]}")
    print(f"ratio:  {relayed / echoed:8.2f} at {args.streams} streams")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--step-ms", type=float, default=2
    )  # short enough to keep the router busy: idle rounds cost, too
    parser.add_argument("--echo", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.echo:
        main_echo(options.echo)
    else:
        asyncio.run(main(options))
