"""`octavo bench` as people call it: results, files, bad input in one line, Ctrl-C."""

import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from certificates import Certificates
from scripted_endpoint import openai_server

from octavo.cli import main

FEW = ["--requests", "6", "--concurrency", "2", "--output-tokens", "4", "--prompt-tokens", "5", "--timeout", "5"]


def bench(*words):
    return main(["bench", *words])


def test_http_and_grpc_take_turns_in_one_run(server, endpoint, capsys, tmp_path):
    picture, saved = tmp_path / "a.png", tmp_path / "a.json"
    words = [server.url, "--against", f"grpc://{endpoint}", "--rounds", "2", *FEW, "--slo", "ttft=10s", "--json"]
    code = bench(*words, "--png", str(picture), "--save", str(saved))
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert json.loads(saved.read_text()) == found
    http, grpc = found["endpoints"]
    assert (http["kind"], http["model"]) == ("completions", "tiny")
    assert (grpc["kind"], grpc["model"]) == ("grpc", "words")
    assert http["total"]["completed"] == grpc["total"]["completed"] == 12
    assert http["total"]["output_tokens"] == grpc["total"]["output_tokens"] == 48
    assert http["total"]["counted_by"] == grpc["total"]["counted_by"] == {"usage": 12}
    assert grpc["total"]["goodput"]["share"] == 1.0
    assert found["comparison"]["output_tokens_per_s"]["num_rounds"] == 2
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.stat().st_size > 10_000


def test_failures_are_counted_and_all_failing_ends_badly(server, capsys):
    server.status = 503
    assert bench(server.url, *FEW) == 1
    out, err = capsys.readouterr()
    assert "6 failed: HTTP 503: the queue is full" in out
    assert "no request completed: HTTP 503: the queue is full" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["127.0.0.1:50051"], 2, "write one such as grpc://"),
        (["grpc://"], 2, "HOST:PORT"),
        (["grpc://h:99999999"], 2, "port must be"),
        (["http://"], 2, "has no host"),
        (["http://h:99999999"], 2, "write a URL such as"),
        (["http://me:secret@h"], 2, "--api-key-file"),
        (["--requests", "x"], 2, "from 1 on"),
        (["--prompt-tokens", "9-3"], 2, "lognormal:MEDIAN,SIGMA"),
        (["--slo", "ttft=5"], 2, "ttft=500ms"),
        (["--extra-body", "[]"], 2, "no JSON object"),
        (["--temperature", "nan"], 2, "no number above 0"),
        (["--rate", "1", "--concurrency", "2"], 2, "leave out --rate"),
        (["--burstiness", "2"], 2, "add --rate"),
        (["--requests", "2", "--duration", "2"], 2, "takes the place of --requests"),
        (["--against-model", "x"], 2, "add --against"),
        (["--prefixes", "2"], 2, "add --shared-prefix"),
        (["--think-time", "2"], 2, "add --turns"),
        (["--token-ids", "--chat"], 2, "leave out --chat"),
        (["--dataset", "x", "--turns", "2"], 2, "leave out --dataset"),
        (["--png", "/no/folder/a.png"], 2, "no file in a folder"),
        (["--tokenizer", "/no/folder"], 1, "tokenizer"),
        (["--state-dir", "nowhere"], 1, "no `octavo up` runs"),
        (["http://127.0.0.1:9", "--api-key-file", "none"], 1, "No such file"),
        (["http://127.0.0.1:9", "--timeout", "3"], 1, "correct the URL"),
        (["grpc://127.0.0.1:9", "--timeout", "0.5"], 1, "correct the URL"),
    ],
)
def test_bad_input_is_one_line_with_its_remedy(words, code, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert bench(*words) == code
    out, err = capsys.readouterr()
    assert says in err and "secret" not in err
    assert err.startswith("octavo bench: ") and err.count("\n") == 1
    assert out == ""


def test_a_server_of_grpc_is_told_from_one_of_http(capsys):
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    assert bench(f"http://127.0.0.1:{port}", *FEW) == 1
    server.stop(None)
    assert "speaks no HTTP/1: octavo by gRPC is grpc://HOST:PORT" in capsys.readouterr().err


def test_a_key_goes_to_its_own_endpoint_alone(server, capsys, tmp_path):
    server.key = "the-secret-key"
    (tmp_path / "key").write_text("the-secret-key\n")
    key = str(tmp_path / "key")
    assert bench(server.url, *FEW, "--json", "--api-key-file", key) == 0
    out, err = capsys.readouterr()
    assert "the-secret-key" not in out + err
    assert bench(server.url, *FEW, "--api-key-file", key, "--against", server.url) == 1
    assert "HTTP 401: give its key with" in capsys.readouterr().err
    keys = ["--api-key-file", key, "--against-api-key-file", key]
    assert bench(server.url, *FEW, *keys, "--against", server.url, "--rounds", "1") == 0


def test_https_needs_the_authority_that_has_signed(tmp_path, capsys):
    certificates = Certificates(tmp_path / "tls")
    with openai_server(certificates.files("router").http_context()) as server:
        assert bench(server.url, *FEW) == 1
        assert "certificate chain: name who has signed with --tls-ca" in capsys.readouterr().err
        assert bench(server.url, *FEW, *certificates.flags("client")) == 0
        assert len(server.bodies) == 2 + 6
