"""Server reflection under both its names: Python's library has only v1alpha, and newer tools ask for v1 first.

The messages of the two are equal but for their package, so one servicer answers both.
"""

from collections.abc import Iterable

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2

SERVICE_NAME = "grpc.reflection.v1.ServerReflection"
_ALPHA, _STABLE = "grpc.reflection.v1alpha", "grpc.reflection.v1"


def add_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> None:
    """Lets clients ask for the services of those names, and for reflection itself."""
    _add_stable_file()
    names = [*service_names, reflection.SERVICE_NAME, SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
    servicer = reflection.aio.ReflectionServicer(names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, methods),))


def _add_stable_file() -> None:
    """Describes grpc.reflection.v1 to the pool from which the servicer answers. A second call changes nothing."""
    file = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(_ALPHA, _STABLE)
    for method in file.service[0].method:
        method.input_type = method.input_type.replace(_ALPHA, _STABLE)
        method.output_type = method.output_type.replace(_ALPHA, _STABLE)
    file.ClearField("options")
    file.name, file.package = "grpc/reflection/v1/reflection.proto", _STABLE
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
