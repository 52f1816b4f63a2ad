"""The names of keys and channels in the store. A client never chooses any part of a key.

The functions in lua/ derive the other keys from the generation key, so the names here and there must agree.
"""

from octavo.request.ids import Incarnation, SequenceId

GENERATION = "octavo:gen"
BARRIER = "octavo:barrier"  # written behind a call that waits for replicas


def record(seq_id: SequenceId) -> str:
    return f"octavo:seq:{seq_id}"


def notice_channel(router: Incarnation) -> str:
    return f"octavo:notice:{router}"
