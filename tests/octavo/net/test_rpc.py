"""Errors cross a real connection unchanged; what is not ours becomes INTERNAL; the options do what they say."""

import logging
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from effort import draws
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.rpc import error_details_pb2, status_pb2
from grpc.aio import Metadata
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.net.server import add_standard_services, make_server
from octavo.request import errors, limits
from octavo.request.errors import ServingError
from octavo.wire import statuses
from octavo.wire.channel import open_channel

SERVICE = "octavo.test.Echo"
CANARY = "xyzzy-canary"
DETAILS_KEY = "grpc-status-details-bin"
ALL = list(errors.CLASSES.values())


KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream", "unary_write"]


class Echo:
    """Raises what it is given, in all four kinds of call; otherwise says back what it hears."""

    def __init__(self, error=None):
        self.error = error

    async def unary_unary(self, request, context):
        if self.error is not None:
            raise self.error
        return request

    async def unary_stream(self, request, context):
        yield b"first"
        yield await self.unary_unary(request, context)

    async def stream_unary(self, requests, context):
        return await self.unary_unary(b"".join([request async for request in requests]), context)

    async def stream_stream(self, requests, context):
        async for request in requests:
            yield await self.unary_unary(request, context)

    async def unary_write(self, request, context):
        await context.write(b"first")
        await context.write(await self.unary_unary(request, context))

    def handlers(self):
        methods = {kind: getattr(grpc, f"{kind}_rpc_method_handler")(getattr(self, kind)) for kind in KINDS[:4]}
        methods["unary_write"] = grpc.unary_stream_rpc_method_handler(self.unary_write)
        methods["parsed"] = grpc.unary_unary_rpc_method_handler(
            self.unary_unary,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, methods)


@asynccontextmanager
async def serving(echo):
    server = make_server()
    server.add_generic_rpc_handlers((echo.handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def served(echo):
    async with serving(echo) as endpoint, open_channel(endpoint) as channel:
        yield channel


async def call(channel, kind, request=b"hello"):
    path = f"/{SERVICE}/{kind}"
    method = getattr(channel, kind.replace("write", "stream"), channel.unary_unary)(path)
    answer = method(iter([request]) if kind.startswith("stream") else request)
    return [reply async for reply in answer] if hasattr(answer, "__aiter__") else [await answer]


def made(cls):
    return cls.restore("field: what, where and what next; ünïcode\nand a line", 1234, {"field": "n", "detail": "x"})


async def test_every_error_crosses_all_calls_unchanged():
    echo = Echo()
    async with served(echo) as channel:
        for cls in ALL:
            for kind in KINDS:
                echo.error = sent = made(cls)
                with pytest.raises(cls) as caught, statuses.serving_errors():
                    await call(channel, kind)
                got = caught.value
                assert (type(got), got.message, got.metadata) == (cls, sent.message, sent.metadata)
                assert (got.retry_after_ms, got.__cause__.code().value[0]) == (1234, cls.code)


@pytest.mark.parametrize("kind", KINDS)
async def test_other_exceptions_become_internal_and_stay_secret(kind, caplog):
    async with served(Echo(KeyError(CANARY))) as channel:
        with caplog.at_level(logging.DEBUG), pytest.raises(ServingError) as caught, statuses.serving_errors():
            await call(channel, kind, b"request " + CANARY.encode())
    assert type(caught.value) is ServingError
    [logged] = [record.getMessage() for record in caplog.records if record.name == "octavo.net.server"]
    assert all(words in logged for words in (caught.value.metadata["id"], "KeyError", "unary_unary"))
    assert CANARY not in caplog.text + str(caught.value)


async def test_invalid_utf8_is_the_caller_s_mistake():
    async with served(Echo()) as channel:
        with pytest.raises(errors.InvalidArgument) as caught, statuses.serving_errors():
            await channel.unary_unary(f"/{SERVICE}/parsed")(b"\x0a\x01\xff")
        assert caught.value.field == "service"
        assert await channel.unary_unary(f"/{SERVICE}/parsed")(b"\x0a\x01a") == b"\x0a\x01a"


async def test_errors_before_any_handler_still_have_a_class():
    unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    async with serving(Echo()) as endpoint:
        async with open_channel(endpoint) as channel:
            with pytest.raises(errors.Unimplemented, match="no router's Inference listener"), statuses.serving_errors():
                await call(channel, "no_such_method")
        async with grpc.aio.insecure_channel(endpoint, options=unlimited) as big:
            with pytest.raises(errors.MessageTooLarge), statuses.serving_errors():
                await call(big, "unary_unary", b"x" * (limits.MAX_MESSAGE_BYTES + 1))
            assert len((await call(big, "unary_unary", b"x" * limits.MAX_MESSAGE_BYTES))[0]) == limits.MAX_MESSAGE_BYTES
    async with open_channel("127.0.0.1:1") as nobody:
        with pytest.raises(errors.Unreachable), statuses.serving_errors():
            await call(nobody, "unary_unary")


@pytest.mark.scaled
async def test_headers_have_a_limit_that_is_exact():
    counted = 32  # what HTTP/2 adds to each header's name and value
    others = 1024  # more than what gRPC sends of its own

    async def code_with(num_bytes):
        call = channel.unary_unary(f"/{SERVICE}/unary_unary")(b"hello", metadata=(("x-long", "a" * num_bytes),))
        return await call.code()

    async with served(Echo()) as channel:
        for _ in range(draws(4, 20)):
            assert await code_with(limits.MAX_METADATA_BYTES - counted - others) is grpc.StatusCode.OK
            for num_bytes in (limits.MAX_METADATA_BYTES - counted, limits.MAX_METADATA_BYTES * 3 // 2):
                assert await code_with(num_bytes) is grpc.StatusCode.RESOURCE_EXHAUSTED


@given(
    message=st.text(max_size=5000),
    metadata=st.dictionaries(st.text(max_size=100), st.text(max_size=1000), max_size=4),
    retry_ms=st.integers(0, 10**9),
    violations=st.lists(st.tuples(st.text(max_size=300), st.text(max_size=1000)), min_size=1, max_size=30),
)
def test_status_of_is_total_and_fits_the_trailers(message, metadata, retry_ms, violations):
    first, *others = (errors.FieldViolation(*violation) for violation in violations)
    for error in (errors.InvalidArgument(*first, *others), errors.QueueFull.restore(message, retry_ms, metadata)):
        status = statuses.status_of(error)
        assert status.code == error.code
        assert 3 * len(status.message.encode()) + 4 / 3 * status.ByteSize() < limits.MAX_METADATA_BYTES


def failed_with(details, code=grpc.StatusCode.UNAVAILABLE):
    """A failed call as gRPC would describe it."""
    return grpc.aio.AioRpcError(code, Metadata(), Metadata((DETAILS_KEY, details)), "details")


def details_of(domain="octavo", code=grpc.StatusCode.UNAVAILABLE, message="details"):
    status = status_pb2.Status(code=code.value[0], message=message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="STALE_EPOCH", domain=domain))
    return status.SerializeToString()


@given(st.binary(max_size=200))
@example(details_of(domain="elsewhere"))
@example(details_of(code=grpc.StatusCode.INVALID_ARGUMENT))
@example(details_of(message="another message"))
def test_details_that_are_not_ours_or_contradict_the_call_are_not_believed(details):
    assert type(statuses.error_from(failed_with(details))) is errors.Unreachable
    assert type(statuses.error_from(failed_with(details_of()))) is not errors.Unreachable


async def test_standard_services_answer():
    server = make_server()
    server.add_generic_rpc_handlers((Echo().handlers(),))
    health = add_standard_services(server, [SERVICE])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status_of(name):
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)

        for name in ("", SERVICE):
            assert await status_of(name) == "NOT_SERVING"
            health.set(name, True)
            assert await status_of(name) == "SERVING"
        with pytest.raises(errors.NotFound), statuses.serving_errors():
            await status_of("nobody")
        assert set((await stub.List(health_pb2.HealthListRequest())).statuses) == {"", SERVICE, "alive"}
        health.shut_down()
        assert (await status_of("alive"), await status_of(SERVICE)) == ("SERVING", "NOT_SERVING")

        async def reflected(version, **request):
            method = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            return await method(iter([reflection_pb2.ServerReflectionRequest(**request)])).read()

        reply = await reflected("v1alpha", list_services="")
        names = {entry.name for entry in reply.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health", "grpc.channelz.v1.Channelz"} <= names
        reply = await reflected("v1", file_containing_symbol="grpc.reflection.v1.ServerReflectionRequest")
        described = FileDescriptorProto.FromString(reply.file_descriptor_response.file_descriptor_proto[0])
        assert described.package == "grpc.reflection.v1" and "v1alpha" not in str(described)
        servers = await channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest())
        assert sum(entry.data.calls_started for entry in servers.server) > 0
    await server.stop(None)


async def test_a_message_that_is_compressed_is_refused():
    """A few kB could be unpacked to gigabytes."""
    echo = Echo()
    async with serving(echo) as endpoint, grpc.aio.insecure_channel(endpoint) as channel:
        unary = channel.unary_unary(f"/{SERVICE}/unary_unary")
        assert await unary(b"x" * 10_000) == b"x" * 10_000
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await unary(b"x" * 10_000, compression=grpc.Compression.Gzip)
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
