"""A model of one's own from a directory: `octavo up --model DIR`, and `octavo generate --token-ids` beside it."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from live.cluster import ROOT
from live.process import Process, wait_until

PROMPT = [5, 9, 100, 7, 8, 7, 6, 5, 4, 3, 2, 1]
NUM_TOKENS = 24


@pytest.fixture
def falcon(tmp_path):
    """A random Falcon as the 40B is built, on disk, without a tokenizer."""
    torch.manual_seed(1)
    config = transformers.FalconConfig(
        vocab_size=128,
        hidden_size=64,
        num_attention_heads=4,
        num_kv_heads=2,
        num_hidden_layers=3,
        new_decoder_architecture=True,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = transformers.FalconForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3)
    model.save_pretrained(tmp_path / "falcon")
    return tmp_path / "falcon", model


def octavo(command, state_dir, *words):
    return [sys.executable, "-m", "octavo.cli", command, *map(str, words), "--state-dir", str(state_dir), "--json"]


@pytest.mark.timeout(240)
def test_a_falcon_answers_token_ids_as_transformers_does(falcon, tmp_path):
    directory, model = falcon
    state, log = tmp_path / "state", tmp_path / "up.log"
    options = ["--model", directory, "--routers", 1, "--workers", 1, "--grpc-port", 0, "--kv-cache-bytes", "4MiB"]
    up = Process("up", octavo("up", state, *options), log, ROOT)
    up.start()
    try:
        wait_until(lambda: not up.running or '"ready": true' in log.read_text(), 120, "octavo up is not ready")
        assert up.running, up.tail()
        prompt = ",".join(map(str, PROMPT))
        words = ("--token-ids", prompt, "--max-tokens", NUM_TOKENS, "--temperature", 0)
        done = subprocess.run(octavo("generate", state, *words), capture_output=True, text=True, cwd=ROOT, timeout=60)
    finally:
        assert up.stop(40.0) == 0
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)["token_ids"]
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT + output]), use_cache=False).logits[0, len(PROMPT) - 1 : -1].argmax(-1)
    assert len(output) == NUM_TOKENS and output == expected.tolist()
