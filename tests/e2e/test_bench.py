"""`octavo bench` against a live deployment, by gRPC and by HTTP."""

import json
import re
import signal
import subprocess
import sys

import pytest
from live.cluster import ROOT
from live.process import wait_until

LOAD = ["--prompt-tokens", "6", "--output-tokens", "5-12", "--concurrency", "4", "--requests", "12", "--warm-up", "2"]
COMMAND = [sys.executable, "-m", "octavo.cli", "bench"]


def endpoints(cluster):
    return "grpc://" + ",".join(cluster.endpoints)


def bench(*words, code=0):
    done = subprocess.run([*COMMAND, *words], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stderr
    return done


def test_a_router_is_measured_by_grpc_and_by_http_in_turns(cluster, tmp_path):
    http, picture = f"http://{cluster.http_endpoints[0]}", tmp_path / "a.png"
    words = [endpoints(cluster), "--against", http, "--rounds", "2", "--shared-prefix", "32", "--slo", "e2e=60s"]
    done = bench(*words, "--json", "--png", str(picture), *LOAD)
    found = json.loads(done.stdout)
    assert [endpoint["kind"] for endpoint in found["endpoints"]] == ["grpc", "completions"]
    assert found["endpoints"][0]["model"] == found["endpoints"][1]["model"]
    first, second = (endpoint["total"] for endpoint in found["endpoints"])
    for total in (first, second):
        assert total["failures"] == {}
        assert total["goodput"]["requests"] == 24
        assert 0 < total["ttft_ms"]["p50"] <= total["e2e_ms"]["p99"]
        assert (total["completed"], total["short_answers"]) == (24, 0)
        assert total["counted_by"] == {"usage": 24}
        assert total["prompt_tokens"] > 0
    assert first["output_tokens"] == second["output_tokens"]
    assert found["comparison"]["output_tokens_per_s"]["num_rounds"] == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert done.stderr == ""  # no progress bar without a terminal


@pytest.mark.long
def test_ctrl_c_cancels_what_runs_and_shows_the_rest(cluster):
    """Requests of any length: the ones under way at Ctrl-C are cancelled, as the fixture checks by free blocks."""
    words = [endpoints(cluster), "--output-tokens", "400", "--concurrency", "4", "--requests", "4000", "--warm-up", "1"]
    process = subprocess.Popen([*COMMAND, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def running():
        assert process.poll() is None, process.communicate()
        return sum(cluster.load(name).num_sequences for name in cluster.worker_endpoints) >= 4

    wait_until(running, 60, "four requests run")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert re.search(r"cut by Ctrl-C +4\n", out)
    assert "interrupted: these are the results so far" in out
    assert err == ""
