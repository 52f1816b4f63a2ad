"""`octavo up`: a store, routers and workers on this machine, kept alive until Ctrl-C."""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from dataclasses import replace

from octavo.cli.access import development_ca
from octavo.cli.doctor import CheckReport, machine_checks, model_checks, store_check
from octavo.client import AsyncClient
from octavo.local import state
from octavo.local.certificate_files import certificate_files
from octavo.local.cluster import Cluster, ClusterSettings
from octavo.local.program_command import find_program
from octavo.local.supervisor import StartError, Supervisor
from octavo.net.security.roles import PeerRole
from octavo.process.command_error import CommandError
from octavo.process.listen_address import EVERY_INTERFACE, with_host
from octavo.request.errors import ServingError
from octavo.settings.command_parser import USAGE, CommandParser
from octavo.settings.exposure import INCOMPLETE_TLS, exposure_refusal, exposure_warning
from octavo.settings.loading import add_common_arguments, from_args
from octavo.settings.options import flag, masked
from octavo.settings.router import RouterSettings
from octavo.settings.setting_sources import add_arguments
from octavo.settings.up import UP_DECIDES, UpSettings
from octavo.settings.worker import WorkerSettings
from octavo.wire.tls import TlsError

START_TIMEOUT_S = 600.0  # for loading a large model; a process that ends is noticed at once
GRACE_S = 2.5  # a person waits; what is killed after it loses nothing but the time of a lease
REWRITE_S = 1.0
SAMPLE_PROMPT = "Gravity is"
SAMPLE_IDS = [1, 2, 3]  # the prompt where a model has no tokenizer
SAMPLE_TOKENS = 20  # with which the demo model ends a sentence
SAMPLE_TIMEOUT_S = 60.0


def add_parser(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    text = "serve a model on this machine until Ctrl-C"
    parser = commands.add_parser("up", help=text, usage=USAGE, description=__doc__)
    add_common_arguments(parser, [UpSettings, RouterSettings, WorkerSettings])
    add_arguments(parser, UpSettings)
    add_arguments(parser, RouterSettings, skip=UP_DECIDES)
    add_arguments(parser, WorkerSettings, skip=UP_DECIDES)
    parser.add_argument("--json", action="store_true", help="print the state as JSON when everything is ready")
    parser.chosen = {flag(name): remedy for name, remedy in UP_DECIDES.items()}
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    wanted = _settings(args)
    _require_usable(wanted)
    try:
        with state.locked(wanted.state_dir):
            _make_certificates(wanted)
            return asyncio.run(_UpProcess(wanted, args.json).run())
    except TlsError as error:
        raise CommandError(str(error)) from None
    except StartError as error:
        if error.log:
            print(error.log, file=sys.stderr)
        raise


def _make_certificates(wanted: ClusterSettings) -> None:
    """Makes the certificates of --secure, unless there are some that stay valid for weeks."""
    folder = wanted.tls_folder
    if folder is not None and not development_ca().is_complete(folder):
        development_ca().make_certificates(folder, [] if wanted.up.host in EVERY_INTERFACE else [wanted.up.host])


def _settings(args: argparse.Namespace) -> ClusterSettings:
    up = from_args(UpSettings, args)
    return ClusterSettings(
        up=up,
        router=from_args(RouterSettings, args),
        worker=from_args(WorkerSettings, args),
        state_dir=state.directory_of(up.state_dir),
    )


def _require_usable(wanted: ClusterSettings) -> None:
    """Raises CommandError for settings that would make the processes fail seconds later, or wait in vain."""
    up, worker = wanted.up, wanted.worker
    if up.prefill_workers + up.decode_workers > up.workers:
        raise CommandError(
            f"--prefill-workers {up.prefill_workers} and --decode-workers {up.decode_workers} are more than "
            f"--workers {up.workers}, of which they are"
        )
    _require(machine_checks.block_memory(up.workers, worker.kv_cache_bytes, max(worker.swap_bytes, 0), up.device))
    _require_protected(wanted)
    if up.store:
        _require(asyncio.run(store_check.store(up.store)))
    if worker.runner == "model":
        _require(machine_checks.gpu(up.device))
        _require(model_checks.model(up.model))
        _require(model_checks.tokenizer(wanted.router.tokenizer or up.model))
        if worker.draft_model:
            fix = "name another model of the same tokenizer, or leave it out"
            _require(replace(model_checks.model(worker.draft_model), name="--draft-model", fix=fix))


def _require_protected(wanted: ClusterSettings) -> None:
    """Raises CommandError if other machines could call routers without TLS, unless that is asked for."""
    up, router = wanted.up, wanted.router
    files = (router.tls_cert, router.tls_key, router.tls_ca)
    if up.secure and any(files):
        raise CommandError("--secure makes certificates of its own: leave --tls-cert, --tls-key and --tls-ca out")
    if any(files) and not all(files):
        raise CommandError(INCOMPLETE_TLS)
    refusal = exposure_refusal([with_host(f"127.0.0.1:{up.grpc_port}", up.host)], "give --secure")
    if refusal and not (up.secure or all(files) or up.insecure):
        raise CommandError(refusal)


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
        protected = up.secure or self._settings.router.tls_cert
        if not protected and (warning := exposure_warning(self._cluster.public_addresses)):
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
            shown = current.to_json()
            shown["store"]["url"] = masked(current.store.url)  # stdout may be a log
            print(json.dumps(shown), flush=True)
            return
        async with AsyncClient(current.endpoints, credentials=self._settings.credentials(PeerRole.CLIENT)) as client:
            # Unless the router says otherwise. Without one of its keys nobody knows which calls the model takes.
            has_text, hears, known = True, False, not self._settings.router.api_keys
            with contextlib.suppress(ServingError):
                models = await client.models()
                has_text = all(model.has_tokenizer for model in models)
                hears, known = any(model.takes_speech for model in models), True
            print(_banner(current, has_text, hears, self._settings, known), flush=True)
            if hears:
                print("  sample      none: the model writes down what it hears\n", flush=True)
            elif self._settings.router.api_keys:
                print("  sample      none: requests need one of the keys of --api-keys\n", flush=True)
            else:
                await self._show_sample(client, has_text)
        print("Ctrl-C ends everything.", flush=True)

    async def _show_sample(self, client: AsyncClient, has_text: bool) -> None:
        prompt = SAMPLE_PROMPT if has_text else SAMPLE_IDS
        try:
            answer = await client.complete(
                prompt, max_tokens=SAMPLE_TOKENS, temperature=0.0, deadline_s=SAMPLE_TIMEOUT_S
            )
        except ServingError as error:
            self._say(f"the sample request failed: {error.message}")
            return
        ids = f" {list(answer.outputs[0].token_ids)}; the model has no tokenizer"
        print(f"  sample      {prompt}{repr(answer.text)[1:-1] if has_text else ids}\n", flush=True)

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


def _banner(
    current: state.ClusterState, has_text: bool, hears: bool, wanted: ClusterSettings, known: bool = True
) -> str:
    """What is where. `known`: which calls the model takes."""
    endpoints = ",".join(current.endpoints)
    workers = ", ".join(f"{worker.worker_id} {worker.endpoint}" for worker in current.workers)
    tls = security_flags(wanted, "--tls-ca", "--tls-cert", "--tls-key")
    octavo = f"{find_program('octavo') or 'octavo'} generate {tls}".strip()
    curl = security_flags(wanted, "--cacert", "--cert", "--key")
    grpcurl = security_flags(wanted, "-cacert", "-cert", "-key") or "-plaintext"
    watched = [*(router.web for router in current.routers), *(worker.web for worker in current.workers)]
    status = f"octavo status --state-dir {wanted.state_dir}" if wanted.up.state_dir else "octavo status"
    http = curl_line(current.routers[0].http, has_text, curl, wanted.router.api_keys, hears)
    prompt = f"'{SAMPLE_PROMPT}'" if has_text else f"--json --token-ids {','.join(map(str, SAMPLE_IDS))}"
    calls = [
        f"  {grpcurl_line(current.endpoints[0], has_text, grpcurl)}",
        f"  {http}",
        f"  {octavo} --endpoint {endpoints} {prompt} --max-tokens {SAMPLE_TOKENS} --temperature 0",
    ]
    return "\n".join(
        [
            "",
            f"octavo serves {current.model}",
            f"  endpoints   {', '.join(current.endpoints)}",
            f"  http        {', '.join(f'{router.http}/v1' for router in current.routers)}",
            f"  admin       {', '.join(router.admin_endpoint for router in current.routers)}",
            f"  workers     {workers}",
            f"  status      {status}",
            f"  page        {', '.join(f'{router.web}/' for router in current.routers)}",
            f"  metrics     {', '.join(f'{web}/metrics' for web in watched)}",
            "",
            *((calls[1:2] if hears else calls) if known else ()),
            "",
        ]
    )


def security_flags(wanted: ClusterSettings, ca: str, cert: str, key: str) -> str:
    """The flags by which a program calls as a client, under its names for them; empty without TLS."""
    files = (wanted.router.tls_cert, wanted.router.tls_key, wanted.router.tls_ca)
    if wanted.tls_folder is not None:
        files = certificate_files(wanted.tls_folder, PeerRole.CLIENT)
    return f"{ca} {files[2]} {cert} {files[0]} {key} {files[1]}" if files[0] else ""


def curl_line(base: str, has_text: bool, security: str, api_keys: str, hears: bool = False) -> str:
    """A curl command that can be pasted. Where there are API keys, it takes one from the variable OPENAI_API_KEY."""
    body = {"prompt": SAMPLE_PROMPT if has_text else SAMPLE_IDS, "max_tokens": SAMPLE_TOKENS, "temperature": 0}
    flags = f" {security}" if security else ""
    key = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if api_keys else ""
    if hears:
        return f"curl{flags} {base}/v1/audio/transcriptions{key} -F file=@speech.wav"
    return f"curl{flags} {base}/v1/completions{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def grpcurl_line(endpoint: str, has_text: bool = True, security: str = "-plaintext") -> str:
    """A grpcurl command that can be pasted."""
    prompt = {"text": SAMPLE_PROMPT} if has_text else {"token_ids": {"ids": SAMPLE_IDS}}
    request = {**prompt, "sampling": {"max_tokens": SAMPLE_TOKENS, "temperature": 0}}
    grpcurl = find_program("grpcurl") or "grpcurl"
    return f"{grpcurl} {security} -d '{json.dumps(request)}' {endpoint} octavo.v1.Inference/Complete"
