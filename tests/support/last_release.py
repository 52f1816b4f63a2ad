"""A router or a worker that speaks to the store and to its peers as those of the last release do.

    python tests/support/last_release.py router|worker ARGUMENTS

It is this release, with what the last one lacked taken out: it loads and calls the library of revision 13, its internal
revision is 2, and as a worker it neither sends nor takes blocks. At a release, what stands here is written anew.
"""

import gzip
import sys
from pathlib import Path
from typing import Any, NoReturn

from octavo import wire
from octavo.errors import StoreFull, Unimplemented
from octavo.record import NewSequence
from octavo.store import codec, library
from octavo.store.calls import AcceptReply, AcceptStatus, QueueDepth, QueueLimits
from octavo.store.redis import RedisStore

GOLDEN = Path(__file__).parents[1] / "golden"
REVISION = 13
INTERNAL_REVISION = 2
MODULES = {"router": "router.__main__", "worker": "gpu_worker.__main__"}
# The last release has none of these settings' features.
ARGUMENTS = {"router": [], "worker": ["--move-limit", "0", "--no-prefix-fetch", "--warm-up-ms", "0"]}


def library_text() -> str:
    """The function library of the last release."""
    return gzip.decompress((GOLDEN / f"store_library_{REVISION}.lua.gz").read_bytes()).decode()


async def accept(store: RedisStore, new: NewSequence, limits: QueueLimits) -> AcceptReply:
    """Calls `accept` as the last release does, without bounds of a tenant and a head start."""
    prompt, fixed = codec.pack_tokens(new.prompt), codec.fixed_fields(new)
    bounds = (new.cost, limits.max_requests, limits.max_tokens, new.deadline_in_ms, new.num_branches)
    try:
        reply = await store._call_on(new.seq_id, "accept", *bounds, prompt, *fixed)
    except StoreFull:
        return AcceptReply(AcceptStatus.FULL)
    return AcceptReply(AcceptStatus(reply[0].decode()), QueueDepth(reply[1], reply[2]))


async def pop(store: RedisStore, model: str, count: int, claim_ms: int, *_: int) -> list[Any]:
    """Calls `pop` as the last release does, without places."""
    return await popped_now(store, model, count, claim_ms)


popped_now = RedisStore.pop


async def refuse_transfer(*_: object) -> NoReturn:
    raise Unimplemented("Transfer comes with live migration; until then a sequence moves by take and replay")


async def refuse_migration(*_: object) -> Any:
    raise Unimplemented("Migrate is not there yet")
    yield


def speak_as_before(program: str) -> None:
    """Takes out of this process what the last release lacked."""
    wire.INTERNAL_REVISION = wire.OLDEST_WORKER_REVISION = INTERNAL_REVISION
    library.REVISION, library.source = REVISION, library_text  # type: ignore[assignment]
    RedisStore.accept, RedisStore.pop = accept, pop  # type: ignore[method-assign]
    if program == "worker":
        from gpu_worker.migrating.transfer_service import TransferService
        from gpu_worker.serving.server import WorkerService

        WorkerService.Migrate = refuse_migration  # type: ignore[assignment, method-assign]
        for name in ("Prepare", "Extend", "Finish", "Abort", "Fetch", "ListHot"):
            setattr(TransferService, name, refuse_transfer)


def main() -> None:
    import runpy

    _, program, *arguments = sys.argv
    speak_as_before(program)
    sys.argv = [program, *arguments, *ARGUMENTS[program]]
    runpy.run_module(MODULES[program], run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
