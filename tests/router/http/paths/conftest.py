"""A small Whisper behind a router, and forms with sounds for it."""

import pytest
from spoken_types import EDGE, LETTERS, SOUND, USUAL, TinySpeech, form

from gpu_worker.running.loading import load_runner

PATH = "/v1/audio/transcriptions"


@pytest.fixture(scope="package")
def tiny(tmp_path_factory):
    return TinySpeech(
        tmp_path_factory.mktemp("whisper"), suppress=[token for token in range(USUAL) if token not in LETTERS]
    )


@pytest.fixture
async def hearing(world, tiny):
    runner = load_runner(str(tiny.directory), kv_cache_bytes=1 << 22, block_size=8, swap_bytes=0)
    await world.start([runner], 1, router={"http_unknown_fields": "refuse", "sound_bytes": 6 << 20})
    return world


@pytest.fixture
def ask(hearing, call):
    async def one(sound=SOUND, body=None, kind=f"multipart/form-data; boundary={EDGE}", headers=None, **fields):
        sent = form(sound, **fields) if body is None else body
        return await call("POST", PATH, sent, content_type=kind, **headers or {})

    return one
