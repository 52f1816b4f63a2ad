"""Writes hashes.json: vectors of the hashes in docs/protocol-reference.md, for implementations in any language.

Written from that text and not from octavo/request/hashing.py, which is tested against the result. Run it after a
deliberate change of the format, and say so in the changelog:  python tests/golden/make_hashes.py
"""

import hashlib
import json
from pathlib import Path

FILE = Path(__file__).with_name("hashes.json")
ROOT = bytes(range(32))
LONG = [(i * 2654435761) % 2**32 for i in range(48)]


def u32(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def root_key(*parts: str) -> bytes:
    data = b"".join(u32(len(part.encode())) + part.encode() for part in parts)
    return hashlib.blake2b(data, digest_size=32, person=b"octavo.root.v1\0\0").digest()


def block_hash(root: bytes, parent: bytes, token_ids: list[int]) -> bytes:
    return hashlib.blake2b(parent + u32(*token_ids), key=root, digest_size=16).digest()


def block_hashes(root: bytes, token_ids: list[int], block_size: int) -> list[str]:
    parents = [b""]
    for block in range(len(token_ids) // block_size):
        parents.append(block_hash(root, parents[-1], token_ids[block * block_size : (block + 1) * block_size]))
    return [parent.hex() for parent in parents[1:]]


def extended(chain: int, token_ids: list[int]) -> int:
    for token_id in token_ids:
        data = chain.to_bytes(8, "little") + u32(token_id)
        chain = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    return chain


def prompt_chain(token_ids: list[int]) -> int:
    return int.from_bytes(hashlib.blake2b(u32(*token_ids), digest_size=8).digest(), "little")


def vectors() -> dict[str, list[dict[str, object]]]:
    """64-bit numbers are strings of 16 hex digits (most significant first): JSON numbers lose their low bits."""
    names = ("fingerprint", "layout", "lora", "salt", "numerics")
    roots = [
        ("", "", "", ""),
        ("model-1", "float32.hnd.16", "", ""),
        ("model-1", "float32.hnd.16", "", "tenant-a"),
        ("model-1", "float32.hnd.16", "tenant-a", ""),
        ("model-1float32", ".hnd.16", "", ""),
        ("modèle-模型", "float32.hnd.16", "", "x" * 200),
        ("model-1", "float32.hnd.16", "", "", "cpu/native-1/avx2"),
    ]
    blocks = [
        (ROOT, b"", [0] * 16),
        (ROOT, b"", list(range(16))),
        (ROOT, block_hash(ROOT, b"", list(range(16))), list(range(16, 32))),
        (ROOT, b"", [2**32 - 1] * 8),
        (root_key(*roots[1]), b"", LONG[:16]),
        (root_key(*roots[2]), b"", LONG[:16]),
        (ROOT, b"", LONG[:128] * 2),
    ]
    runs = [(LONG, 16), (LONG, 8), (LONG[:31], 16), (LONG[:15], 16)]
    chains = [(0, []), (0, [0]), (0, [1, 2, 3]), (2**64 - 1, [2**32 - 1]), (prompt_chain(LONG), LONG[:5])]
    prompts: list[list[int]] = [[], [0], [1, 2, 3], LONG]
    return {
        "root_key": [{**dict(zip(names, root, strict=False)), "root": root_key(*root).hex()} for root in roots],
        "block_hash": [
            {"root": root.hex(), "parent": parent.hex(), "token_ids": ids, "hash": block_hash(root, parent, ids).hex()}
            for root, parent, ids in blocks
        ],
        "block_hashes": [
            {"root": ROOT.hex(), "token_ids": ids, "block_size": size, "hashes": block_hashes(ROOT, ids, size)}
            for ids, size in runs
        ],
        "extend_chain": [
            {"chain": f"{chain:016x}", "token_ids": ids, "after": f"{extended(chain, ids):016x}"}
            for chain, ids in chains
        ],
        "prompt_chain": [{"token_ids": ids, "chain": f"{prompt_chain(ids):016x}"} for ids in prompts],
    }


def text() -> str:
    lines = (
        f" {json.dumps(kind)}: [\n" + ",\n".join(f"  {json.dumps(vector)}" for vector in items) + "\n ]"
        for kind, items in vectors().items()
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
