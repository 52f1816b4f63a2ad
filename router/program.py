"""The life of a router process: open the store, run a router until it is asked to end, leave."""

import asyncio
import logging

from octavo.net.security.api_keys import ApiKeyError
from octavo.net.traces import TracesError, open_tracer
from octavo.process.listen_address import ListenError
from octavo.process.loop import Stopped, StopRequest, before, stop_request
from octavo.process.retry import until_answered
from octavo.request.errors import Mismatch
from octavo.request.ids import new_incarnation
from octavo.settings.router import RouterSettings
from octavo.store import open_store
from octavo.store.base import Store
from octavo.store.store_tally import StoreTally
from octavo.text.tokenizers.tokenizer import Tokenizer, load_tokenizer
from octavo.wire.tls import TlsError
from router.loop_watchdog import HANG_LEASES, LoopWatchdog
from router.router import Router
from router.router_lease import RESUME_SECRET

log = logging.getLogger(__name__)


class TokenizerError(Exception):
    """The tokenizer that the settings name cannot be loaded. The message says why."""


def given_tokenizer(path: str) -> Tokenizer | None:
    """The tokenizer at that path; None without a path. Raises TokenizerError."""
    try:
        return load_tokenizer(path) if path else None
    except Exception as error:  # a file may be broken in any way
        raise TokenizerError(f"--tokenizer {path} cannot be loaded: {error}") from error


async def serve(settings: RouterSettings) -> int:
    """Runs a router until SIGTERM or SIGINT. Returns the exit status of the process.

    After SIGTERM its streams may go on for `drain_ms`; SIGINT, or a second SIGTERM, ends them at once.
    """
    stop = stop_request()
    tally = StoreTally()
    store = open_store(
        settings.store,
        replicas=settings.store_replicas,
        replica_timeout_ms=settings.store_replica_timeout_ms,
        tally=tally,
    )
    try:
        tokenizer = await before(stop.asked, asyncio.to_thread(given_tokenizer, settings.tokenizer))
        secret = await before(
            stop.asked, until_answered(lambda: open_with_secret(store), pause_s=0.5, what="start (is --store right?)")
        )
        tracer = open_tracer("router", settings.traces_endpoint, settings.traces_share)
        router = Router(settings, store, secret, new_incarnation(), tokenizer, tally, tracer)
        await before(stop.asked, router.start())
    except Stopped:
        log.info("asked to end while starting")
        await store.close()
        return 0
    except (ListenError, TokenizerError, Mismatch, TlsError, ApiKeyError, TracesError) as error:
        log.error("%s", error)
        await store.close()
        return 1
    with LoopWatchdog(HANG_LEASES * settings.lease_ms / 1000):
        return await end_when_asked(router, store, stop)


async def end_when_asked(router: Router, store: Store, stop: StopRequest) -> int:
    """Returns the exit status once the router has ended: asked to, or because one of its loops has failed."""
    failed = asyncio.create_task(router.wait_for_failure())
    stopping = asyncio.create_task(stop.asked.wait())
    await asyncio.wait([failed, stopping], return_when=asyncio.FIRST_COMPLETED)
    asked = stop.asked.is_set()
    if asked:
        await router.leave(stop.urgent)
    await router.stop()
    await store.close()
    if failed.done() and not asked:
        log.error("a loop of the router ended: %s", failed.exception())
        return 1
    return 0


async def open_with_secret(store: Store) -> bytes:
    """Opens the store, and returns the key of resume tokens."""
    await store.open()
    return await store.secret(RESUME_SECRET)
