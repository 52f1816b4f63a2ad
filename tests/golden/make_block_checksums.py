"""Writes block_checksums.json: vectors of the checksum of blocks that travel, in plain numbers.

Written from the text of csrc/include/octavo/part_sum.h and not from the code that is tested against the result. Run it
after a deliberate change, and say so in the changelog:  python tests/golden/make_block_checksums.py
"""

import hashlib
import json
from pathlib import Path

FILE = Path(__file__).with_name("block_checksums.json")
MASK = 2**64 - 1
STEP = 0xD6E8FEB86659FD93
SECRET = bytes(range(32))


def mixed(word: int, place: int) -> int:
    x = (word + (place + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def checksum(data: bytes, seed: int) -> int:
    padded = data + bytes(-len(data) % 64)
    lanes = [0] * 8
    for at in range(0, len(padded), 8):
        stripe, lane = divmod(at // 8, 8)
        word = int.from_bytes(padded[at : at + 8], "little")
        half = word ^ ((mixed(seed, lane) + stripe * STEP) % 2**64)
        lanes[lane] = (lanes[lane] + (half % 2**32) * (half >> 32)) % 2**64
        lanes[lane ^ 1] = (lanes[lane ^ 1] + word) % 2**64
    total = mixed(seed ^ len(data), 8)
    for lane, value in enumerate(lanes):
        total = mixed(total ^ value, lane)
    return total


def content(length: int) -> bytes:
    """Bytes that anybody can make again: SHAKE-128 of nothing."""
    return hashlib.shake_128(b"").digest(length)


def seed_of(ticket: int, index: int, name: bytes) -> int:
    data = ticket.to_bytes(8, "little") + index.to_bytes(4, "little") + name
    digest = hashlib.blake2b(data, key=SECRET, digest_size=8, person=b"octavo.seed.v1\0\0").digest()
    return int.from_bytes(digest, "little")


def vectors() -> dict[str, list[dict[str, object]]]:
    """64-bit numbers are strings of 16 hex digits (most significant first): JSON numbers lose their low bits."""
    lengths = [0, 1, 7, 8, 63, 64, 65, 127, 128, 1000, 4096, 5000]
    seeds = [0, 1, MASK, 0x0123456789ABCDEF]
    names = [(0, 0, b""), (1, 2, b"x" * 16), (MASK, 2**32 - 1, bytes(16))]
    return {
        "checksum": [
            {"length": length, "seed": f"{seed:016x}", "checksum": f"{checksum(content(length), seed):016x}"}
            for length in lengths
            for seed in seeds
        ],
        "seed": [
            {"secret": SECRET.hex(), "ticket": f"{ticket:016x}", "index": index, "name": name.hex(),
             "seed": f"{seed_of(ticket, index, name):016x}"}
            for ticket, index, name in names
        ],
    }  # fmt: skip


def text() -> str:
    parts = (
        f' "{name}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
        for name, rows in vectors().items()
    )
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
