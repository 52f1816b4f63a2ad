"""The names of keys and channels in the store. A client never chooses any part of a key.

All keys of a sequence share the hash tag of its shard, so that each function touches one slot of a cluster. The
functions in lua/ derive a shard's other keys from its generation key, so the names here and there must agree.
"""

from octavo.ids import Incarnation, SequenceId

MAX_SHARDS = 64
QUEUED_CHANNEL = "octavo:queued"


def shard_of(seq_id: SequenceId, num_shards: int) -> int:
    return int(seq_id[:4], 16) % num_shards


def prefix(shard: int) -> str:
    return f"octavo:{{s{shard}}}:"


def generation(shard: int) -> str:
    return prefix(shard) + "gen"


def record(shard: int, seq_id: SequenceId) -> str:
    return f"{prefix(shard)}seq:{seq_id}"


def notice_channel(router: Incarnation) -> str:
    return f"octavo:notice:{router}"
