"""A store that comes back with an older past, another one, or none: a stream goes on, or says that it cannot."""

import re
import shutil
from dataclasses import replace

import pytest
from live.cluster import Shape
from live.fixtures import whole
from live.history import History

from octavo.client import SamplingParams
from octavo.local.embedded import EmbeddedStore
from octavo.request import errors
from octavo.request.ids import sequence_id
from octavo.store import codec, open_store

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(180)]

SHAPE = Shape(step_delay_ms=20, lease_ms=1500, router_args=("--grace-ms", "30000"))
PROMPT = [7, 11, 13]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=400)
WORKERS = ("w0", "w1")


@pytest.fixture
def cluster(clusters):
    yield from whole(clusters(SHAPE))


class Past:
    """The data of the store as they were, for the time after its next death."""

    def __init__(self, cluster, tmp_path) -> None:
        self._cluster = cluster
        self._files = cluster.directory / "store" / "appendonlydir"
        self._saved = tmp_path / "past"

    def save(self) -> None:
        """The data of this moment; the last command may be half written, which a server forgives."""
        shutil.copytree(self._files, self._saved / "appendonlydir")

    async def rewrite_tail(self, request_id: str, tokens: list[int]) -> None:
        """Another worker has written these tokens after the journal's first 30."""
        server = EmbeddedStore(self._saved)
        await server.start()
        store = open_store(server.url)
        await store.open()
        try:
            seq_id = sequence_id("", request_id)
            (journal,) = (await store.read(seq_id, from_indexes=[0])).outputs
            assert tuple(tokens) != journal[30 : 30 + len(tokens)]
            tail = b"".join(token.to_bytes(4, "little") for token in tokens)
            await store.server.client.setrange(f"{codec.record_key(seq_id)}:0", 4 * 30, tail)
        finally:
            await store.close()
            await server.stop()

    def flip_bit(self, request_id: str) -> None:
        """A bit of the journal's first append is another one in the file."""
        (file,) = self._files.glob("*.incr.aof")
        data = bytearray(file.read_bytes())
        key = f"{codec.record_key(sequence_id('', request_id))}:0".encode()
        value = re.search(rb"APPEND\r\n\$\d+\r\n%b\r\n\$\d+\r\n" % re.escape(key), data)
        assert value is not None
        data[value.end()] ^= 1
        file.write_bytes(data)

    def bring_back(self, *victims: str, flipped: str = "") -> None:
        """Kills the store, and others with it, and starts all again: on the data that were saved, or on none; or on
        those there are, with a bit of this request flipped."""
        for name in ("store", *victims):
            self._cluster.kill(name)
        if flipped:
            self.flip_bit(flipped)
        else:
            shutil.rmtree(self._files)
            if self._saved.exists():
                shutil.copytree(self._saved / "appendonlydir", self._files)
        for name in ("store", *victims):
            self._cluster.spawn(name)
        self._cluster.wait_ready()


@pytest.fixture
def past(cluster, tmp_path):
    return Past(cluster, tmp_path)


async def read(stream, history, to=10**6):
    """So many tokens of the first branch, or all."""
    while len(history.tokens.get(0, ())) < to and (event := await anext(stream, None)):
        history.add(event)
    return history


async def lost(stream, history=None, error=errors.HistoryLost):
    with pytest.raises(error):
        await read(stream, history or History())


async def test_an_older_past_that_is_computed_again_goes_on(cluster, past, oracle):
    """With both workers dead nobody has the lost tokens; they are computed again, and nothing is delivered twice."""
    async with cluster.client() as client:
        stream = client.generate(PROMPT, PARAMS)
        history = await read(stream, History(), 40)
        past.save()
        await read(stream, history, 80)
        past.bring_back(*WORKERS)
        await read(stream, history)
    history.check(oracle.outputs(PROMPT, PARAMS))


@pytest.mark.parametrize(
    ("num_other", "victims"),
    [(5, WORKERS), (100, WORKERS), (0, WORKERS), (0, ())],
    ids=["a shorter past", "a longer past", "damage, all die", "damage, the store dies"],
)
async def test_another_past_is_lost_history_and_never_another_text(cluster, past, oracle, num_other, victims):
    """Of another worker; or with another bit: the server has no checksum over what it appends to its file, and loads
    another token without a word."""
    async with cluster.client() as client:
        stream = client.generate(PROMPT, PARAMS)
        history = await read(stream, History(), 40)
        if num_other:
            past.save()
            await past.rewrite_tail(stream.request_id, [1] * num_other)
            await read(stream, history, 80)
        token = stream.resume_token
        past.bring_back(*victims, flipped="" if num_other else stream.request_id)
        await lost(stream, history)
        got = history.tokens[0]
        assert tuple(got) == oracle.outputs(PROMPT, PARAMS)[0].token_ids[: len(got)]
        for routers in ([0], [1]):
            async with cluster.client(routers) as other:
                await lost(other.attach(resume_token=token), History(starts=[len(got)]))
        await client.cancel(stream.request_id)


async def test_a_lost_record_is_lost_history_and_tokens_after_the_loss_are_good_everywhere(cluster, past, oracle):
    async with cluster.client([0]) as one, cluster.client([1]) as two:
        stream = one.generate(PROMPT, PARAMS)
        history = await read(stream, History(), 40)
        token = stream.resume_token
        past.bring_back("r1")  # an empty store, and a router that knows no old key
        await lost(stream, history)
        await lost(one.attach(resume_token=token))
        await lost(two.attach(resume_token=token), error=errors.ForeignToken)
        await lost(two.attach(stream.request_id), error=errors.NotFound)
        # Streams that begin after the loss move between the router that had the old key and the one that never had it.
        for seed, (first, second) in enumerate([(one, two), (two, one)]):
            params = replace(PARAMS, seed=seed, max_tokens=60)
            begun = first.generate(PROMPT, params)
            history = await read(begun, History(), 20)
            async with second.attach(resume_token=begun.resume_token) as rest:
                await read(rest, history)
            history.check(oracle.outputs(PROMPT, params))
            await begun.aclose()
