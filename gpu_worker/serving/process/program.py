"""The life of a worker process: listen, load the model, wait for the store, serve, leave."""

import asyncio
import gc
import logging
import os
import time

from gpu_worker.drafting.draft_model import DraftModel
from gpu_worker.engine.configuration import build_draft_model, build_runner, followed_host, refuse_missing_gpu
from gpu_worker.serving.process import progress_monitor
from gpu_worker.serving.process.lease import WorkerIdTaken, register_worker
from gpu_worker.serving.process.listener import Listener, NoAddress
from gpu_worker.serving.process.worker import Worker, member_of
from gpu_worker.steps.runner import Runner
from octavo.net.traces import TracesError, open_tracer
from octavo.process import failpoints
from octavo.process.listen_address import ListenError, why_not_listening
from octavo.process.loop import Stopped, before, stop_request
from octavo.process.retry import until_answered
from octavo.process.telemetry import stack_of
from octavo.request.errors import InvalidArgument, ServingError
from octavo.settings.worker import WorkerSettings
from octavo.store import open_store
from octavo.store.base import Store
from octavo.store.store_tally import StoreTally
from octavo.wire.tls import TlsError

log = logging.getLogger(__name__)

STORE_PAUSE_S = 0.5


async def serve(settings: WorkerSettings) -> int:
    """Runs a worker until SIGTERM or SIGINT, or until another worker has its id. Returns the process's exit status.

    On SIGTERM its sequences go to other workers, little by little; on SIGINT, or a second SIGTERM, all at once.

    It does not return where a thread is still at work: the process then ends at once, with status 0 or 1 while the
    model loads, and with that of `give_up` when a step hangs.
    """
    stop = stop_request()
    try:
        refuse_missing_gpu(settings)
        if (follow := followed_host(settings)) is not None:
            return await follow(stop)
    except (InvalidArgument, TlsError) as error:
        log.error("cannot start: %s", error)
        return 1
    failpoints.arm_all(settings.failpoints)
    try:
        tracer = open_tracer("worker", settings.traces_endpoint, settings.traces_share)
        listener = Listener(settings)
        await listener.open()
    except (NoAddress, TlsError) as error:
        log.error("cannot start: %s", error)
        return 1
    except (ListenError, TracesError) as error:
        log.error("%s", error)
        return 1
    except RuntimeError:
        log.error("%s", why_not_listening(settings.address, "--listen"))
        return 1
    tally = StoreTally()
    store = open_store(
        settings.store,
        replicas=settings.store_replicas,
        replica_timeout_ms=settings.store_replica_timeout_ms,
        tally=tally,
    )
    listener.web_app.exporter.add_source(tally.values)
    try:
        runner, draft_model = await before(stop.asked, load_and_register(settings, listener, store))
        worker = Worker(settings, listener, store, runner, tracer, draft_model)
    except (Stopped, WorkerIdTaken) as error:
        asked = isinstance(error, Stopped)
        log.log(logging.INFO if asked else logging.ERROR, "%s", "asked to end while starting" if asked else error)
        await listener.close(0)
        os._exit(0 if asked else 1)  # the thread that loads a model cannot be interrupted; there is nothing to save
    except Exception as error:  # whatever loading raises ends the process, whose last line says why
        if not isinstance(error, ServingError | OSError | MemoryError):
            log.info("where it happened:\n%s", stack_of(error))
        log.error("cannot start: %s", start_failure(error))
        await listener.close(0)
        return 1
    gc.collect()
    gc.freeze()  # else a full collection walks all that was imported, and no step begins for a tenth of a second
    try:
        await before(stop.asked, worker.warm_up())
        await before(stop.asked, worker.learn_limits())
        worker.start()
        await before(stop.asked, worker.lease.lost.wait())
        log.error("%s", worker.lease.loss)
        return 1
    except Stopped:
        await worker.leave(stop.urgent)
        return 0
    finally:
        await end_worker(worker, store, runner)


async def load_and_register(
    settings: WorkerSettings, listener: Listener, store: Store
) -> tuple[Runner, DraftModel | None]:
    """Loads the models, and meanwhile gets the worker its id from the store. Raises what either of them raises."""

    async def register() -> None:
        await until_answered(store.open, pause_s=STORE_PAUSE_S, what="start (is --store right?)")
        await register_worker(store, member_of(listener), settings.lease_ms)

    registering = asyncio.create_task(register())
    loading = asyncio.create_task(build_runners_in_thread(settings))
    try:
        await asyncio.gather(loading, registering)
    finally:
        registering.cancel()
    return loading.result()


def start_failure(error: Exception) -> str:
    """Why the worker cannot start, and what to do, in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, ServingError):
        return text
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}: make it readable, or give another --model"
    if isinstance(error, MemoryError) or "memory" in text.lower():
        return f"not enough memory ({text or 'MemoryError'}): lower --kv-cache-bytes or --swap-bytes"
    return f"{type(error).__name__}: {text}"


async def end_worker(worker: Worker, store: Store, runner: Runner) -> None:
    """Stops the worker and closes what it used. A runner whose step still runs is not closed: the process gives up.

    It only ends, with status 0, where whoever asked it to end waits: that step has not had much time.
    """
    loop_ended = await worker.stop()
    await store.close()
    if loop_ended:
        runner.close()
    elif worker.urgent:
        log.info("ended; the step in flight is not waited for")
        os._exit(0)
    else:
        progress_monitor.give_up("the step in flight does not end")


async def build_runners_in_thread(settings: WorkerSettings) -> tuple[Runner, DraftModel | None]:
    """Loads the model, and the one that guesses for it, in a thread: the listener answers meanwhile.

    Raises what loading raises.
    """
    started = time.monotonic()
    log.info("loading %s", settings.model if settings.runner == "model" else f"the {settings.runner} runner")
    runner = await asyncio.to_thread(build_runner, settings)
    log.info("%s on %s is ready to run after %.1f s", runner.info.model, runner.info.device, time.monotonic() - started)
    return runner, await asyncio.to_thread(build_draft_model, settings, runner.info)
