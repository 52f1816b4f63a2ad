"""Where a process listens, as the kernel says it."""

import os
import socket
import struct
from pathlib import Path

LISTEN = "0A"


def listening(pid: int) -> set[tuple[str, int]]:
    """Address and port of every TCP socket on which the process listens. It has no other sockets than those of TCP,
    of Unix without a name, and those that are connected."""
    inodes = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            name = os.readlink(f"/proc/{pid}/fd/{number}")
        except FileNotFoundError:
            continue
        if name.startswith("socket:["):
            inodes.add(name[len("socket:[") : -1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                address, _, port = fields[1].rpartition(":")
                found.add((_written(address), int(port, 16)))
    return found


def _written(address: str) -> str:
    """The kernel writes an address as words of the machine's byte order; one of version 4 in 6 is one of version 4."""
    packed = b"".join(struct.pack("=I", int(address[i : i + 8], 16)) for i in range(0, len(address), 8))
    if len(packed) == 16 and packed.startswith(bytes(10) + b"\xff\xff"):
        packed = packed[12:]
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
