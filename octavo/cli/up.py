"""`octavo up`: a store, routers and workers on this machine, kept alive until Ctrl-C."""

import argparse
import asyncio
import contextlib
import json
import signal
import sys

from octavo import settings
from octavo.cli import checks, model_checks, state, store_check
from octavo.cli.check_report import CheckReport
from octavo.cli.cluster import Cluster, ClusterSettings
from octavo.cli.command_error import CommandError
from octavo.cli.programs import find_program
from octavo.cli.supervisor import StartError, Supervisor
from octavo.client import AsyncClient
from octavo.command_parser import USAGE
from octavo.errors import ServingError
from octavo.listen_address import exposure_warning
from octavo.setting_sources import add_arguments

START_TIMEOUT_S = 600.0  # for loading a large model; a process that ends is noticed at once
GRACE_S = 2.5  # a person waits; what is killed after it loses nothing but the time of a lease
REWRITE_S = 1.0
SAMPLE_PROMPT = "The capital of France is"
SAMPLE_IDS = [1, 2, 3]  # the prompt where a model has no tokenizer
SAMPLE_TIMEOUT_S = 60.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "up", help="serve a model on this machine until Ctrl-C", usage=USAGE, description=__doc__
    )
    settings.add_common_arguments(parser, [settings.UpSettings, settings.RouterSettings, settings.WorkerSettings])
    add_arguments(parser, settings.UpSettings)
    add_arguments(parser, settings.RouterSettings, skip=settings.UP_DECIDES)
    add_arguments(parser, settings.WorkerSettings, skip=settings.UP_DECIDES)
    parser.add_argument("--json", action="store_true", help="print the state as JSON when everything is ready")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    wanted = _settings(args)
    _require_usable(wanted)
    try:
        with state.locked(wanted.state_dir):
            return asyncio.run(_UpProcess(wanted, args.json).run())
    except StartError as error:
        if error.log:
            print(error.log, file=sys.stderr)
        raise


def _settings(args: argparse.Namespace) -> ClusterSettings:
    others = (settings.RouterSettings, settings.WorkerSettings)
    up = settings.from_args(settings.UpSettings, args, started=others)
    return ClusterSettings(
        up=up,
        router=settings.from_args(settings.RouterSettings, args),
        worker=settings.from_args(settings.WorkerSettings, args),
        state_dir=state.directory_of(up.state_dir),
    )


def _require_usable(wanted: ClusterSettings) -> None:
    """Raises CommandError for what the processes would notice only seconds later, or wait for in vain."""
    up, worker = wanted.up, wanted.worker
    _require(checks.block_memory(up.workers, worker.kv_cache_bytes, max(worker.swap_bytes, 0), up.device))
    if up.store:
        _require(asyncio.run(store_check.store(up.store)))
    if worker.runner == "model":
        _require(model_checks.model(up.model))
        _require(model_checks.tokenizer(wanted.router.tokenizer or up.model))


def _require(report: CheckReport) -> None:
    if report.result == "bad":
        raise CommandError(f"{report.name}: {report.detail}: {report.fix}")


class _UpProcess:
    """The process of `octavo up`: starts the cluster, shows it, keeps it alive, and ends it."""

    def __init__(self, wanted: ClusterSettings, as_json: bool) -> None:
        self._settings = wanted
        self._as_json = as_json
        self._cluster = Cluster(wanted)
        self._ready = False
        self._unwritten: asyncio.TimerHandle | None = None  # tries to write the state again
        self._supervisor = Supervisor(self._say, self._write_state, restart=wanted.up.restart)

    async def run(self) -> int:
        """Runs until a signal asks it to end, or until an error. The exit code after a signal is 0.

        A second signal kills what has not ended yet.
        """
        asked, urgent = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, lambda: (urgent if asked.is_set() else asked).set())
        serving = asyncio.create_task(self._serve())
        ending = asyncio.create_task(asked.wait())
        try:
            await asyncio.wait([serving, ending], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()  # raises the error of the task
            return 0
        finally:
            serving.cancel()
            ending.cancel()
            await asyncio.gather(serving, ending, return_exceptions=True)
            self._say("ending; a second Ctrl-C ends at once")
            asked.set()
            await self._end(urgent)
            state.remove(self._settings.state_dir)

    async def _end(self, urgent: asyncio.Event) -> None:
        """Ends all processes: within GRACE_S, or at once when `urgent` is set."""
        stopping = asyncio.create_task(self._supervisor.stop(GRACE_S))
        killing = asyncio.create_task(urgent.wait())
        await asyncio.wait([stopping, killing], return_when=asyncio.FIRST_COMPLETED)
        killing.cancel()
        if not stopping.done():
            self._say("killing what has not ended")
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
            await self._supervisor.stop(0.0)
        else:
            stopping.result()

    async def _serve(self) -> None:
        up = self._settings.up
        self._say(f"state and logs are in {self._settings.state_dir}")
        if warning := exposure_warning(self._cluster.public_addresses):
            self._say(f"warning: {warning}")
        await self._supervisor.start(self._cluster.store_processes, START_TIMEOUT_S)
        self._say(f"starting {up.routers} router(s), and {up.workers} worker(s) that load {up.model}")
        await self._supervisor.start(self._cluster.processes, START_TIMEOUT_S)
        self._ready = True
        self._write_state()
        await self._introduce()
        await self._supervisor.watch()

    async def _introduce(self) -> None:
        current = self._cluster.state(ready=True)
        if self._as_json:
            print(json.dumps(current.to_json()), flush=True)
            return
        async with AsyncClient(current.endpoints) as client:
            try:
                has_text = all(model.has_tokenizer for model in await client.models())
            except ServingError:
                has_text = True  # the sample tells what is wrong
            print(_banner(current, has_text), flush=True)
            await self._show_sample(client, has_text)
        print("Ctrl-C ends everything.", flush=True)

    async def _show_sample(self, client: AsyncClient, has_text: bool) -> None:
        prompt = SAMPLE_PROMPT if has_text else SAMPLE_IDS
        try:
            answer = await client.complete(prompt, max_tokens=16, temperature=0.0, deadline_s=SAMPLE_TIMEOUT_S)
        except ServingError as error:
            self._say(f"the sample request failed: {error.message}")
            return
        if has_text:
            print(f"  sample      {prompt}{answer.text!r}\n", flush=True)
        else:
            print(
                f"  sample      {prompt} {list(answer.outputs[0].token_ids)}; the model has no tokenizer\n", flush=True
            )

    def _write_state(self) -> None:
        """Writes the state down. While that fails, as on a full disk, it is said once and tried again every second."""
        try:
            state.write(self._settings.state_dir, self._cluster.state(self._ready, self._supervisor.exits_of))
        except OSError as error:
            if self._unwritten is None:
                self._say(f"the state cannot be written: {error.strerror}; see {self._settings.state_dir}")
                self._unwritten = asyncio.get_running_loop().call_later(REWRITE_S, self._write_again)
            return
        if self._unwritten is not None:
            self._unwritten.cancel()
            self._unwritten = None
            self._say("the state is written again")

    def _write_again(self) -> None:
        self._unwritten = asyncio.get_running_loop().call_later(REWRITE_S, self._write_again)
        self._write_state()

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # stderr may be a file on a full disk
            print(text, file=sys.stderr, flush=True)


def _banner(current: state.ClusterState, has_text: bool) -> str:
    endpoints = ",".join(current.endpoints)
    workers = ", ".join(f"{worker.worker_id} {worker.endpoint}" for worker in current.workers)
    prompt = f"'{SAMPLE_PROMPT}'" if has_text else f"--json --token-ids {','.join(map(str, SAMPLE_IDS))}"
    return "\n".join(
        [
            "",
            f"octavo serves {current.model}",
            f"  endpoints   {', '.join(current.endpoints)}",
            f"  admin       {', '.join(router.admin_endpoint for router in current.routers)}",
            f"  workers     {workers}",
            "",
            f"  {grpcurl_line(current.endpoints[0], has_text)}",
            f"  {find_program('octavo') or 'octavo'} generate --endpoint {endpoints} {prompt} --max-tokens 16",
            "",
        ]
    )


def grpcurl_line(endpoint: str, has_text: bool = True) -> str:
    """A grpcurl command that can be pasted."""
    prompt = {"text": SAMPLE_PROMPT} if has_text else {"token_ids": {"ids": SAMPLE_IDS}}
    request = {**prompt, "sampling": {"max_tokens": 16, "temperature": 0}}
    grpcurl = find_program("grpcurl") or "grpcurl"
    return f"{grpcurl} -plaintext -d '{json.dumps(request)}' {endpoint} octavo.v1.Inference/Complete"
