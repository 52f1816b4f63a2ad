"""Types of ids, so that an argument in the wrong place fails mypy, and the functions that make ids."""

import hashlib
import secrets
from typing import NewType

SequenceId = NewType("SequenceId", str)  # 32 hex digits, derived from tenant and request id; never chosen by a client
RequestId = NewType("RequestId", str)  # the client's name of its request
Incarnation = NewType("Incarnation", str)  # random id of one process life of a worker or router
BlockId = NewType("BlockId", int)  # index of a block in the device arena
HostBlockId = NewType("HostBlockId", int)  # index of a block in the host pool
BlockHash = NewType("BlockHash", bytes)  # 16 bytes, see octavo.request.hashing


def new_incarnation() -> Incarnation:
    return Incarnation(secrets.token_hex(8))


def new_request_id() -> RequestId:
    return RequestId("r-" + secrets.token_hex(16))


def new_operation_id() -> str:
    """Makes a name for one store operation, by which the store recognizes a retry after a lost reply."""
    return secrets.token_hex(8)


def sequence_id(tenant: str, request_id: RequestId) -> SequenceId:
    """The id of a request's sequence. It depends on the tenant: another tenant's request id finds no record."""
    name = len(tenant).to_bytes(4, "little") + tenant.encode() + request_id.encode()
    return SequenceId(hashlib.blake2b(name, digest_size=16, person=b"octavo.seq.v1").hexdigest())


def cell_number(request_id: str, num_cells: int) -> int:
    """The number of the request's cell, from 0. The greatest SHA-256 over the id, "#" and the cell's number wins."""
    digests = [hashlib.sha256(f"{request_id}#{cell}".encode()).digest() for cell in range(num_cells)]
    return digests.index(max(digests))
