"""Every command says in one line what is wrong with what it was given, and what to do: no traceback, no hang."""

import io
import os
import socket
import struct
import subprocess
import sys

import pytest
from effort import diagonal

from octavo.cli import main
from octavo.cli.doctor import machine_checks, model_checks
from octavo.local import state
from octavo.process import machine

OCTAVO = [sys.executable, "-m", "octavo.cli"]
NO_SECONDS = [f"{flag}={text}" for flag in ("--timeout", "--deadline") for text in ("x", "0", "-1", "nan", "inf")]
UP = ["up", "--grpc-port=0", "--state-dir=state"]
ASK = ["--prompt=hi"]
QUESTIONS = [["generate", *ASK], ["chat"]]
CONFIGS = {"broken.toml": "[up", "program.toml": "[workr]\nthreads = 1\n", "type.toml": "[up]\nworkers = 'two'\n"}
SAFETENSORS = struct.pack("<Q", 2) + b"{}"
LLAMA = b'{"model_type": "llama"}'
GGUF = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 20) + b"general.architecture"
MODELS = {  # folders of a model, by file
    "empty": {},
    "nothing": {"config.json": b"{}", "model.safetensors": SAFETENSORS},
    "no-json": {"config.json": b"model_type: llama", "model.safetensors": SAFETENSORS},
    "no-text": {"config.json": b"\xff\xfe\x00", "model.safetensors": SAFETENSORS},
    "a-list": {"config.json": b"[]", "model.safetensors": SAFETENSORS},
    "pickled": {"config.json": LLAMA, "pytorch_model.bin": b""},
    "quantized": {
        "config.json": b'{"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes"}}',
        "model.safetensors": SAFETENSORS,
    },
    "cut": {"config.json": LLAMA, "model.safetensors": SAFETENSORS[:9]},
    "lfs": {"config.json": LLAMA, "model.safetensors": b"version https://git-lfs.github.com/spec/v1\n"},
    "weights": {"config.json": LLAMA, "model.safetensors": None},  # a folder where a file should be
    "tokenizer": {"config.json": LLAMA, "model.safetensors": SAFETENSORS, "tokenizer.json": b'{"x"'},
    "gguf": {"model.gguf": b"GGUF"},
    "plamo": {"model.gguf": GGUF + struct.pack("<IQ", 8, 6) + b"plamo2"},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory: broken configurations, broken models, and a file where a directory should be."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("something else")
    for name, text in CONFIGS.items():
        (tmp_path / name).write_text(text)
    for name, files in MODELS.items():
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).mkdir() if content is None else (tmp_path / name / file).write_bytes(content)
    return tmp_path


BAD = [
    # the command line itself
    ([], 2, "COMMAND"),
    (["genrate"], 2, "did you mean generate?"),
    (["serve", "smollm2"], 2, "no such command: serve; did you mean up?"),
    (["up", "--port=8000"], 2, "no such argument: --port=8000; did you mean --grpc-port?"),
    (["x\udcff"], 2, "no such command"),
    (["completion", "tcsh"], 2, "bash"),
    *(([name, "--jsn"], 2, "did you mean --json?") for name in ("up", "status", "doctor", "chat")),
    *(([name, "--stor=x"], 2, "did you mean --store?") for name in ("router", "worker", "up", "doctor")),
    (["generate", "hi", "--token-ids=1,x"], 2, "such as 1,2,3"),
    (["generate", "Once", "upon", "a", "time"], 2, "no such argument: upon; a text with spaces needs quotes"),
    *(
        ([name, "/models/x"], 2, "/models/x; it takes no text here, and --model names a model")
        for name in ("up", "worker")
    ),
    (["chat", "Hi there"], 2, "no such argument: Hi there; it takes no text here"),
    *((["generate", "hi", flag], 2, "number of seconds above 0") for flag in NO_SECONDS),
    (["status", "--timeout=soon"], 2, "number of seconds above 0"),
    (["generate", "hi", "--max-tokens=many"], 2, "--max-tokens"),
    *((["generate", *words, "--endpoint=127.0.0.1:1"], 2, "prompt: give one") for words in ([], ["hi", *ASK])),
    *(([*words, "--endpoint=127.0.0.1:1,h:99999"], 2, ": --endpoint: h:99999: port must") for words in QUESTIONS),
    (["status", "--admin-endpoint=127.0.0.1:1,h:99999"], 2, "status: --admin-endpoint: h:99999: port must"),
    (["top", "--interval=0"], 2, "no number of seconds above 0"),
    (["top", "--admin-endpoint=127.0.0.1:1"], 1, "stdout is no terminal: give --once or --json"),
    (["prefix"], 2, "ACTION is missing: give add, remove, list"),
    *(([name, "remove"], 2, f"NAME is missing: a name in `octavo {name} list`") for name in ("prefix", "adapter")),
    (["prefix", "add", "x", "--text"], 2, "prefix add: FILE is missing: a file with the text; - is stdin"),
    (["prefix", "add", "x", "a-file", "--txt"], 2, "prefix add: no such argument: --txt; did you mean --text?"),
    (["prefix", "add", "x", "You are kind"], 1, "FILE: You are kind: No such file or directory; name a file with"),
    (["prefix", "add", "x", "no-text/config.json"], 1, "FILE: no-text/config.json is no text in UTF-8"),
    (
        ["adapter", "add"],
        2,
        "NAME is missing: letters, digits, dots, dashes and underscores; PATH is missing: its folder",
    ),
    # what would be open to others
    *(([name, "--host=0.0.0.0"], 2, "--tls-key and --tls-ca, or --insecure") for name in ("router", "worker")),
    *(([name, "--tls-cert=a.crt", "--tls-key=a.key"], 2, "belong together") for name in ("router", "worker")),
    (["router", "--no-client-certificates"], 2, "--no-client-certificates needs --api-keys"),
    ([*UP, "--host=0.0.0.0"], 1, "give --secure"),
    ([*UP, "--secure", "--tls-cert=a.crt"], 1, "--secure makes certificates of its own: leave --tls-cert"),
    ([*UP, "--tls-cert=a.crt"], 1, "belong together"),
    # secrets
    (["generate", "hi", "--endpoint=127.0.0.1:1", "--api-key-file=a-file"], 1, "must hold one key, and nothing else"),
    (["generate", "hi", "--endpoint=127.0.0.1:1", "--tls-ca=nowhere"], 1, "nowhere"),
    (["cert", "tls", "--host=é.example"], 1, "--host: "),
    (["key", "new", "acme", "--file=a-file/x"], 1, "--file a-file/x: Not a directory"),
    (["store-acl"], 1, "give --password-file FILE, or --setuser"),
    (["store-acl", "--password-file=a-file", "--user=a b"], 1, "--user: letters, digits, dots"),
    (["store-acl", "--password-file=/dev/null"], 1, "is empty"),
    # settings, from every source
    *(([name, "--config=nowhere.toml"], 2, "No such file") for name in ("up", "router", "worker", "doctor")),
    *(([name, "--config=."], 2, "--config") for name in ("up", "router", "worker", "doctor")),
    *((["up", f"--config={name}"], 2, name) for name in CONFIGS),
    *(([name, "--store=foo://x"], 2, "must begin with redis://") for name in ("up", "router", "worker", "doctor")),
    *(([name, "--device=tpu"], 2, "must be auto, cpu, cuda or cuda:N") for name in ("up", "worker", "doctor")),
    (["up", "--workers=0"], 2, "`octavo router` runs a router alone"),
    *(([*UP, f"--device={name}"], 1, "driver finds no GPU here: say --device cpu, or") for name in ("cuda", "cuda:1")),
    ([*UP, "--prefill-workers=2", "--decode-workers=1"], 1, "are more than --workers 2"),
    # the state directory
    *(([*words, "--state-dir=a-file"], 1, "is not a directory: choose another") for words in (*QUESTIONS, ["up"])),
    *(([name, "--state-dir=a-file/x"], 1, "is not a directory: choose another") for name in ("up", "status")),
    (["status", "--state-dir=~nobody-of-this-name/x"], 1, "no home directory is known: say with --state-dir"),
    *(([*words, "--state-dir=nowhere"], 1, "no `octavo up` runs on") for words in (["status"], ["top", "--once"])),
    (["status", "--state-dir=nowhere"], 1, "or name routers with --admin-endpoint"),
    (["generate", "--state-dir=nowhere", *ASK], 1, "name routers with --endpoint"),
    # the store
    ([*UP, "--store=redis://127.0.0.1:1"], 1, "start it, or correct --store"),
    ([*UP, "--store=redis://nowhere.invalid"], 1, "correct the host in --store"),
    ([*UP, "--store=unix:///nowhere.sock"], 1, "correct the path in --store"),
    ([*UP, "--store=memory://"], 1, "within one process"),
    # memory
    *(([*UP, f"--{flag}=900TB"], 1, "GiB for blocks; this machine has") for flag in ("kv-cache-bytes", "swap-bytes")),
    # the model
    ([*UP, "--model=no/such/model"], 1, "no such file"),
    ([*UP, "--model=~nobody-of-this-name/model"], 1, "no such file"),
    ([*UP, "--draft-model=no/such/model"], 1, "--draft-model: no/such/model: no such file"),
    ([*UP, "--model=empty"], 1, "holds no model: it needs config.json"),
    *(([*UP, f"--model={name}"], 1, "names no model") for name in ("nothing", "a-list")),
    *(([*UP, f"--model={name}"], 1, "is not JSON") for name in ("no-json", "no-text")),
    ([*UP, "--model=cut"], 1, "cut short"),
    ([*UP, "--model=pickled"], 1, "pytorch_model.bin, a pickle, which may contain code: convert it once"),
    ([*UP, "--model=lfs"], 1, "git lfs pull"),
    ([*UP, "--model=quantized"], 1, "quantized by 'bitsandbytes' (quantization_config) are not read; use a checkpoint"),
    ([*UP, "--model=weights"], 1, "make it readable"),
    ([*UP, "--model=a-file"], 1, "is no GGUF file"),
    *(([*UP, f"--{flag}=tokenizer"], 1, "tokenizer.json cannot be read") for flag in ("model", "tokenizer")),
    ([*UP, "--model=gguf"], 1, "4 bytes are too few for a GGUF header: copy it again"),
    ([*UP, "--model=plamo/model.gguf"], 1, "architecture 'plamo2' are not read (llama, "),
]


@pytest.mark.parametrize(("words", "code", "says"), BAD, ids=lambda value: str(value)[:60].encode("ascii", "replace"))
def test_one_line_says_what_is_wrong(folder, capsys, monkeypatch, words, code, says):
    monkeypatch.setattr(machine, "CUDA_DRIVER", "libnone.so")
    assert main(words) == code
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("octavo")
    assert says in line
    assert captured.out == ""
    assert not (folder / "state").exists()  # nothing was begun


def test_bytes_of_stdin_that_are_no_text_are_refused(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"kind \xff")))
    assert main(["prefix", "add", "x", "-"]) == 1
    assert capsys.readouterr().err == "octavo prefix: FILE: - is no text in UTF-8; convert it\n"


def test_doctor_says_the_same_words(folder, capsys):
    for name in MODELS:
        found = [model_checks.model(name), model_checks.tokenizer(name)]
        bad = next(report for report in found if report.result == "bad")
        assert main([*UP, f"--model={name}"]) == 1
        assert capsys.readouterr().err == f"octavo up: {bad.name}: {bad.detail}: {bad.fix}\n"


# ---- streams that are closed, or take no text ------------------------------------------------------------------------


def test_a_reader_that_ends_early_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([*OCTAVO, "completion", "bash"], stdout=writing, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


CLOSED = ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]
COMMANDS = ["completion bash", "status --state-dir x", "chat --state-dir x", "nothing"]


@pytest.mark.parametrize(("command", "closed"), diagonal(COMMANDS, CLOSED))
def test_closed_streams_are_no_error(tmp_path, closed, command):
    shell = f"{sys.executable} -m octavo.cli {command} {closed}"
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == {"completion": 0, "status": 1, "chat": 1, "nothing": 2}[command.split()[0]]
    assert "Traceback" not in done.stderr


def test_a_worker_tells_of_a_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [*OCTAVO, "worker", "--runner=fake", f"--listen={address}", "--store=memory://"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert f"cannot listen on {address}" in last
    assert "choose with --listen" in last


def test_a_directory_of_somebody_else_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(state.StateDirectoryError, match="is not writable: choose another"), state.locked(tmp_path):
        pass
    assert machine_checks.directory(str(tmp_path)).result == "bad"
