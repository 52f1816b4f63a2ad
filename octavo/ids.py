"""Names and numbers that must not be mixed up: a swapped argument fails mypy."""

import hashlib
import secrets
from typing import NewType

SequenceId = NewType("SequenceId", str)  # 32 hex digits, derived from tenant and request id; never chosen by a client
RequestId = NewType("RequestId", str)  # what the client calls its request
Incarnation = NewType("Incarnation", str)  # random id of one worker (or router) process life
BlockId = NewType("BlockId", int)  # index of a block in the device arena
HostBlockId = NewType("HostBlockId", int)  # index of a block in the host pool
BlockHash = NewType("BlockHash", bytes)  # 16 bytes, see octavo.hashing


def new_incarnation() -> Incarnation:
    return Incarnation(secrets.token_hex(8))


def new_request_id() -> RequestId:
    return RequestId("r-" + secrets.token_hex(16))


def new_operation_id() -> str:
    """Names one attempt at a store operation, so that a retry after a lost reply is recognized."""
    return secrets.token_hex(8)


def sequence_id(tenant: str, request_id: RequestId) -> SequenceId:
    """The key of a request's record: bound to the tenant, so that a foreign id is simply not found."""
    name = len(tenant).to_bytes(4, "little") + tenant.encode() + request_id.encode()
    return SequenceId(hashlib.blake2b(name, digest_size=16, person=b"octavo.seq.v1").hexdigest())
