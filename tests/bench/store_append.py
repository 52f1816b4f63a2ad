"""What journalling costs: microseconds per item of append_batch, on the server and for the caller.

    python tests/bench/store_append.py [--store redis://host:port] [--items 20000]

Without --store, on a private Valkey. One client, one connection, one token per item.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from octavo.local.embedded import EmbeddedStore
from octavo.request.ids import Incarnation, SequenceId, new_request_id, sequence_id
from octavo.request.record import NewSequence
from octavo.request.sampling import FinishReason
from octavo.store import open_store
from octavo.store.calls import AppendItem, AppendStatus, Finish, QueueLimits, TakeReason, TakeRequest

BATCHES = (1, 16, 48, 256)


async def start_sequence(store: Any, max_tokens: int) -> SequenceId:
    request_id = new_request_id()
    new = NewSequence(
        seq_id=sequence_id("bench", request_id), request_id=request_id, body_hash=b"", tenant="bench", salt="",
        model="m", layout="l", sampling=b"", prompt=[1] * 100, prompt_chain=0, num_branches=1, max_tokens=max_tokens,
        priority=3, deadline_in_ms=0, keep_on_disconnect=False, router=Incarnation("bench"),
    )  # fmt: skip
    await store.accept(new, QueueLimits(10**6, 10**12))
    await store.take_ownership(TakeRequest(new.seq_id, 0, Incarnation("bench"), "bench", TakeReason.QUEUED))
    return new.seq_id


async def measure(store: Any, batch: int, num_items: int) -> tuple[float, float]:
    """(server, caller) microseconds per item."""
    rounds = max(50, num_items // batch)
    ids = [await start_sequence(store, rounds) for _ in range(batch)]
    await store.server.client.config_resetstat()
    begun = time.perf_counter()
    for index in range(rounds):
        replies = await store.append_batch(
            Incarnation("bench"), [AppendItem(seq_id, 1, 0, index, [index]) for seq_id in ids]
        )
        if any(reply.status is not AppendStatus.OK for reply in replies):
            raise RuntimeError(f"unexpected replies: {replies}")
    seconds = time.perf_counter() - begun
    stats = (await store.server.client.info("commandstats"))["cmdstat_fcall"]
    for seq_id in ids:
        await store.finish(Finish(seq_id, FinishReason.STOP))
    return stats["usec"] / rounds / batch, seconds * 1e6 / rounds / batch


async def main(url: str | None, num_items: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        server = None if url else EmbeddedStore(Path(directory))
        if server is not None:
            await server.start()
        store: Any = open_store(url or server.url)  # type: ignore[union-attr]
        await store.open()
        print(f"{'batch':>6} {'server us/item':>15} {'caller us/item':>15} {'items/s':>10}")
        for batch in BATCHES:
            on_server, for_caller = await measure(store, batch, num_items)
            print(f"{batch:6d} {on_server:15.2f} {for_caller:15.2f} {1e6 / for_caller:10.0f}")
        await store.close()
        if server is not None:
            await server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", help="redis://, rediss:// or unix:// URL of a server to measure")
    parser.add_argument("--items", type=int, default=20_000, help="items per batch size")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.store, arguments.items))
