import asyncio
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from contextlib import asynccontextmanager

import pytest

from octavo.cli import commands, main
from octavo.cli.doctor import machine_checks, native_checks
from octavo.cli.operators import status
from octavo.local import state
from octavo.local.state import ClusterState, RouterState, StoreState, WorkerState
from octavo.settings.up import UpSettings
from octavo.store import connected_store

ANSWER = "Paris, the capital."


def test_generate_prints_one_object(router, endpoint, capsys):
    sampling = ["--max-tokens", "9", "--temperature", "0", "--seed", "7", "--stop", "a", "--stop", "b"]
    assert main(["generate", "--endpoint", endpoint, "--prompt", "hi", *sampling, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == ANSWER
    assert answer["token_ids"] == [0, 1, 2, 3]
    assert answer["finish_reason"] == "STOP"
    assert answer["usage"] == {"prompt_tokens": 5, "output_tokens": 4, "cached_tokens": 0}
    assert answer["num_reattaches"] == 0
    (request,) = router.requests
    assert answer["request_id"] == request.request_id
    sampling = request.sampling
    assert (request.text, sampling.max_tokens, sampling.temperature, sampling.seed) == ("hi", 9, 0.0, 7)
    assert list(sampling.stop) == ["a", "b"]


def test_generate_streams_text_and_survives_a_break(router, endpoint, capsys):
    router.breaks = 1
    assert main(["generate", "--endpoint", f"{endpoint},127.0.0.1:1", "--prompt", "hi"]) == 0
    assert capsys.readouterr().out == ANSWER + "\n"
    assert router.attached == 1


def test_generate_takes_messages_ids_and_stdin(router, endpoint, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from stdin")))
    assert main(["generate", "--endpoint", endpoint, "--prompt", "hi", "--system", "be brief"]) == 0
    assert main(["generate", "--endpoint", endpoint, "--token-ids", "1,2"]) == 0
    assert main(["generate", "--endpoint", endpoint, "--prompt", "-", "--n", "2"]) == 0
    chat, ids, stdin = router.requests
    assert [(turn.role, turn.content) for turn in chat.chat.messages] == [("system", "be brief"), ("user", "hi")]
    assert list(ids.token_ids.ids) == [1, 2]
    assert stdin.text == "from stdin"
    assert capsys.readouterr().out.endswith(f"--- 0: STOP\n{ANSWER}\n--- 1: STOP\n{ANSWER}\n")


@pytest.mark.parametrize(
    ("words", "says"), [(["--temperature=11"], "temperature: at most 10"), (["--max-tokens=-1"], "max_tokens")]
)
def test_generate_says_what_is_refused(endpoint, capsys, words, says):
    assert main(["generate", "hi", "--endpoint", endpoint, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err


def test_without_an_endpoint_the_running_up_is_asked(router, endpoint, capsys, tmp_path):
    assert main(["generate", "--prompt", "hi", "--state-dir", str(tmp_path)]) == 1
    assert "--endpoint" in capsys.readouterr().err
    with state.locked(tmp_path):
        state.write(tmp_path, example(endpoint, tmp_path))
        assert main(["generate", "--prompt", "hi", "--state-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == ANSWER + "\n"


def test_chat_remembers_resets_and_ends(router, endpoint, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n/reset\nthree\n/exit\nfour\n"))
    assert main(["chat", "--endpoint", endpoint, "--system", "s"]) == 0
    assert capsys.readouterr().out == (ANSWER + "\n") * 3
    turns = [[turn.content for turn in request.chat.messages] for request in router.requests]
    assert turns == [["s", "one"], ["s", "one", ANSWER, "two"], ["s", "three"]]


def test_ctrl_c_cancels_the_answer_alone(router, endpoint):
    router.hang.set()
    command = [sys.executable, "-m", "octavo.cli", "chat", "--endpoint", endpoint]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as chat:
        try:
            chat.stdin.write(b"one\n")
            chat.stdin.flush()
            assert os.read(chat.stdout.fileno(), 5) == b"Paris"
            chat.send_signal(signal.SIGINT)
            while not router.cancelled:
                assert chat.poll() is None
                time.sleep(0.01)
            router.hang.clear()
            rest, _ = chat.communicate(b"two\n", timeout=60)
        finally:
            chat.kill()
    assert rest.decode().endswith(f" …\n{ANSWER}\n")
    assert chat.returncode == 0
    assert router.cancelled == [router.requests[0].request_id]
    assert [turn.role for turn in router.requests[1].chat.messages] == ["user", "assistant", "user"]


def test_status_joins_the_file_with_the_answers(endpoint, capsys, tmp_path):
    with state.locked(tmp_path):
        state.write(tmp_path, example(endpoint, tmp_path))
        assert main(["status", "--json", "--state-dir", str(tmp_path)]) == 0
        status = json.loads(capsys.readouterr().out)
        assert main(["status", "--state-dir", str(tmp_path)]) == 0
    worker, missing = status["workers"]
    assert (worker["worker_id"], worker["incarnation"], worker["pid"]) == ("worker-0", "abc", 77)
    assert (worker["endpoint"], worker["num_sequences"]) == ("127.0.0.1:9", 3)
    assert worker["blocks"] == {"free": 10, "used": 20, "cached": 30, "total": 0}
    assert worker["standby"] == {"sequences": 2, "kept_blocks": 15}
    assert worker["ranks"][1] == {"rank": 1, "host": "there", "pid": 78}
    assert missing["ranks"] == []
    assert (worker["role"], missing["role"]) == ("prefill", "")
    assert (missing["worker_id"], missing["pid"], missing["available"]) == ("worker-1", 12, False)
    (router,) = status["routers"]
    assert (router["router_id"], router["pid"], router["serving"], router["num_queued"]) == ("router-0", 10, True, 4)
    assert (status["store"]["pid"], status["store"]["serving"]) == (9, False)
    text = capsys.readouterr().out
    assert re.search(r"worker-1 .*no router knows it now: it starts, hangs, or has ended; see its log", text)
    assert re.search(r"^worker-0 .* abc +prefill +3 ", text, re.M)
    assert re.search(r"^worker +rank +host +pid\nworker-0 +0 +here +77\nworker-0 +1 +there +78$", text, re.M)
    assert re.search(r"^worker +sequences with a standby .*\nworker-0 +2 +15$", text, re.M)
    assert not re.search(r"^worker-1 +0", text, re.M), "it has and keeps none"


def test_status_finds_the_directory_as_up_would(endpoint, capsys, tmp_path, monkeypatch):
    written = example(endpoint, tmp_path)
    written.workers[1].exits = state.ExitHistory().another("signal 9")
    config = tmp_path / "octavo.toml"
    config.write_text(f"[up]\nstate_dir = '{tmp_path}'\n")
    with state.locked(tmp_path):
        state.write(tmp_path, written)
        for variable, value in (("OCTAVO_UP_STATE_DIR", tmp_path), ("OCTAVO_CONFIG", config)):
            with monkeypatch.context() as patched:
                patched.setenv(variable, str(value))
                assert main(["status"]) == 0
            assert re.search(r"worker-1 .* it ended \d+ s ago, and is starting again", capsys.readouterr().out)


def test_status_names_a_silent_router_and_its_log(endpoint, capsys, tmp_path):
    written = example(endpoint, tmp_path)
    written.routers.append(state.RouterState("router-1", 13, "127.0.0.1:1", "127.0.0.1:1"))
    with state.locked(tmp_path):
        state.write(tmp_path, written)
        assert main(["status", "--timeout", "1.5", "--state-dir", str(tmp_path)]) == 0  # time for the one that answers
    log = tmp_path / "logs" / "router-1.log"
    said = f"127.0.0.1:1: no answer within 1.5 s: router-1 (pid 13) starts or hangs; see {log}"
    assert capsys.readouterr().err.splitlines()[-1].endswith(said)
    assert main(["status", "--admin-endpoint", endpoint, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workers"][0]["worker_id"] == "worker-0"
    assert main(["status", "--timeout", "0.1", "--admin-endpoint", "127.0.0.1:1"]) == 1
    told = capsys.readouterr().err
    assert told.endswith("no answer within 0.1 s: correct --admin-endpoint, or wait longer with --timeout\n")


def test_without_its_package_bench_is_named_and_the_rest_works(capsys, monkeypatch):
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    assert main(["bench", "--rate", "3"]) == 2
    assert "bench is in the package octavo_bench, which is not installed" in capsys.readouterr().err
    assert main(["completion", "bash"]) == 0


@pytest.fixture
def taken():
    """A port on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_up_names_a_used_port_and_a_used_directory(capsys, tmp_path, taken):
    assert main(["up", "--grpc-port", str(taken), "--state-dir", str(tmp_path)]) == 1
    assert re.search(rf"port {taken} .*--grpc-port", capsys.readouterr().err)
    with state.locked(tmp_path):
        assert main(["up", "--grpc-port", "0", "--state-dir", str(tmp_path)]) == 1
    assert "--state-dir" in capsys.readouterr().err


def test_up_prints_the_settings_of_all_its_programs(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["up", "--print-config", "--threads=3", "--max-streams=5"])
    assert ended.value.code == 0
    tables = tomllib.loads(capsys.readouterr().out)
    assert set(tables) == {"up", "router", "worker"}
    assert (tables["worker"]["threads"], tables["router"]["max_streams"]) == (3, 5)


def test_doctor_says_what_to_fix(capsys, tmp_path):
    assert main(["doctor", "--json", "--model", "nope", "--state-dir", str(tmp_path), "--grpc-port", "0"]) == 1
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found["model"]["result"] == "bad"
    assert "--model" in found["model"]["fix"]
    assert found["python"]["result"] == found["state"]["result"] == "ok"
    assert main(["doctor", "--workers", "x"]) == 2


BUILT = {"isa": "avx2", "version": "1", "compiler": "gcc 12", "build_type": "Release", "sanitizers": ""}
DETAIL = "native, avx2 kernels, 1, gcc 12, Release"
CPU, CUDA = native_checks.cpu_extension, native_checks.cuda_extension


@pytest.mark.parametrize(
    ("check", "info", "result", "detail"),
    [
        (CPU, BUILT, "ok", DETAIL),
        (CPU, {**BUILT, "sanitizers": "address"}, "note", f"{DETAIL}, with address"),
        (CPU, {**BUILT, "not_built": "avx512"}, "note", f"{DETAIL}; kernels for avx512 were not built"),
        (CPU, {"error": "undefined symbol"}, "bad", "cannot be loaded: undefined symbol"),
        (CPU, None, "note", "not built: the reference ops in torch are used, several times slower"),
        (CUDA, {"devices": 0, "too_old": []}, "ok", "CUDA kernels, no devices"),
        (CUDA, {"devices": 1, "too_old": []}, "ok", "CUDA kernels, 1 device"),
        (CUDA, {"devices": 1, "too_old": ["0 is old"]}, "bad", "the CUDA kernels cannot be used: 0 is old"),
        (CUDA, {"error": "no"}, "bad", "the CUDA kernels cannot be loaded: no"),
    ],
)
def test_doctor_tells_what_was_compiled(check, info, result, detail):
    found = check(info)
    assert (found.result, found.detail) == (result, detail)
    assert found.fix == "make extension" or not detail.endswith("were not built")


def test_doctor_survives_an_extension_that_ends_the_process(monkeypatch):
    monkeypatch.setattr(native_checks, "PROBE", "import os; os.abort()")  # what another processor's code may do
    extension, *_ = native_checks.all_checks()
    assert (extension.name, extension.result) == ("extension", "bad")


def test_doctor_knows_its_own_ports(tmp_path, taken):
    for running, result in ((None, "bad"), (example(f"127.0.0.1:{taken}", tmp_path), "ok")):
        assert [each.result for each in machine_checks.port_checks(UpSettings(grpc_port=taken), running)] == [result]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_flags(capsys, shell):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("generate", "max-tokens", "grpc-port", "doctor", "burstiness"))
    if shell == "bash":
        script += '\nCOMP_WORDS=(octavo generate --max); COMP_CWORD=2; _octavo; echo "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["--max-tokens"]


def example(endpoint, directory):
    return ClusterState(
        pid=8,
        model="m",
        state_dir=str(directory),
        store=StoreState(f"unix://{directory}/no.sock", 9, True),
        routers=[RouterState("router-0", 10, endpoint, endpoint)],
        workers=[WorkerState("worker-0", 11, "127.0.0.1:9"), WorkerState("worker-1", 12, "127.0.0.1:8")],
        ready=True,
    )


@pytest.mark.parametrize("num_silent", [1, 99])
async def test_status_asks_a_slow_store_again(monkeypatch, tmp_path, num_silent):
    asked = []

    @asynccontextmanager
    async def slow_store(url):
        asked.append(url)
        if len(asked) <= num_silent:
            await asyncio.sleep(60)
        async with connected_store("memory://") as store:
            yield store

    monkeypatch.setattr(status, "connected_store", slow_store)
    monkeypatch.setattr(status, "STORE_TRY_S", 0.2)
    monkeypatch.setattr(status, "STORE_TIMEOUT_S", 0.5)
    found = await status._store(example("127.0.0.1:1", tmp_path))
    if num_silent == 1:
        assert (found["serving"], found["trouble"], len(asked)) == (True, "", 2)
    else:
        assert not found["serving"]
        assert found["trouble"].startswith(f"no answer within 0.5 s, {len(asked)} tries: it hangs, or this machine is")
