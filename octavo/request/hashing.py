"""Two hashes. docs/protocol-reference.md defines them byte for byte, and golden vectors in tests/golden/ fix them.

The *block hash* names the content of a full block and of everything before it. The *chain* names a branch's history.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence

from octavo.request.ids import BlockHash


def root_key(fingerprint: str, layout: str, lora: str = "", salt: str = "", numerics: str = "") -> bytes:
    """The key of all block hashes of one model, KV layout, LoRA, tenant salt and class of numerics.

    So a worker that mixes up two classes finds no block, and never a block with other bits.
    """
    named = (fingerprint, layout, lora, salt, *([numerics] if numerics else ()))
    parts = (part.encode() for part in named)
    data = b"".join(struct.pack("<I", len(part)) + part for part in parts)
    return hashlib.blake2b(data, digest_size=32, person=b"octavo.root.v1").digest()


def block_hash(root: bytes, parent: bytes, token_ids: Sequence[int], shown: bytes = b"") -> BlockHash:
    """The hash of a full block after `parent` (empty for the first block). `shown`: what pictures its tokens show."""
    data = parent + struct.pack(f"<{len(token_ids)}I", *token_ids) + shown
    return BlockHash(hashlib.blake2b(data, digest_size=16, key=root).digest())


def shows_nothing(start: int, end: int) -> bytes:
    return b""


def block_hashes(
    root: bytes,
    token_ids: Sequence[int],
    block_size: int,
    known: Sequence[BlockHash] = (),
    shown: Callable[[int, int], bytes] = shows_nothing,
) -> list[BlockHash]:
    """The hashes of all full blocks of `token_ids`. `known` are those of the first ones, as far as computed before.

    `shown` says which pictures the tokens [start, end) show: octavo.pictures.picture.shown.
    """
    hashes = list(known)
    parent: bytes = hashes[-1] if hashes else b""
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        end = start + block_size
        parent = block_hash(root, parent, token_ids[start:end], shown(start, end))
        hashes.append(BlockHash(parent))
    return hashes


def extend_chain(chain: int, token_ids: Iterable[int]) -> int:
    """The chain after more tokens. Each token makes it BLAKE2b-64(chain as u64 LE, token as u32 LE)."""
    for token_id in token_ids:
        digest = hashlib.blake2b(struct.pack("<QI", chain, token_id), digest_size=8).digest()
        chain = int.from_bytes(digest, "little")
    return chain


def prompt_chain(token_ids: Sequence[int]) -> int:
    """The chain at a prompt's end: one BLAKE2b-64 of all its tokens as u32 LE."""
    digest = hashlib.blake2b(struct.pack(f"<{len(token_ids)}I", *token_ids), digest_size=8).digest()
    return int.from_bytes(digest, "little")
