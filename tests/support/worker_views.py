"""Views of workers as the router's fleet has them, for the functions that place and move sequences."""

from typing import Any

from octavo.request.ids import Incarnation
from router.fleet.worker_view import WorkerView


def idle_view(name: str, *, incarnation: str = "", **changes: Any) -> WorkerView:
    """A worker that runs nothing and has a thousand free blocks. Its name is also its incarnation, without another."""
    fields: dict[str, Any] = {
        "incarnation": Incarnation(incarnation or name),
        "worker_id": name,
        "available": True,
        "reason_unavailable": "",
        "queued_tokens": 0,
        "num_running": 0,
        "num_waiting": 0,
        "dispatched_tokens": 0,
        "num_dispatched": 0,
        "num_free_blocks": 1000,
        "num_cached_blocks": 0,
        "num_blocks": 1000,
        "block_size": 16,
        "max_batch_sequences": 64,
        "context_tokens": 8192,
    }
    return WorkerView(**{**fields, **changes})
