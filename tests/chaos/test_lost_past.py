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

SHAPE = Shape(step_delay_ms=20, lease_ms=1500, router_args=("--grace-ms", "30000"))
PROMPT = [7, 11, 13]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=400)


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
        """A bit of the journal's first append is another one in the file. Only while the store is dead."""
        (file,) = self._files.glob("*.incr.aof")
        data = bytearray(file.read_bytes())
        key = f"{codec.record_key(sequence_id('', request_id))}:0".encode()
        value = re.search(rb"APPEND\r\n\$\d+\r\n%b\r\n\$\d+\r\n" % re.escape(key), data)
        assert value is not None
        data[value.end()] ^= 1
        file.write_bytes(data)

    def bring_back(self, *victims: str) -> None:
        """Kills the store, and others with it, and starts all again: on the data that were saved, or on none."""
        for name in ("store", *victims):
            self._cluster.kill(name)
        shutil.rmtree(self._files)
        if self._saved.exists():
            shutil.copytree(self._saved / "appendonlydir", self._files)
        for name in ("store", *victims):
            self._cluster.spawn(name)
        self._cluster.wait_ready()


@pytest.fixture
def past(cluster, tmp_path):
    return Past(cluster, tmp_path)


async def read_to(stream, history, index):
    while len(history.tokens.get(0, ())) < index:
        history.add(await anext(stream))


async def read_all(stream, history):
    async for event in stream:
        history.add(event)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_an_older_past_that_is_computed_again_goes_on(cluster, past, oracle):
    """With both workers dead nobody has the lost tokens; they are computed again, and nothing is delivered twice."""
    async with cluster.client() as client:
        stream, history = client.generate(PROMPT, PARAMS), History()
        await read_to(stream, history, 40)
        past.save()
        await read_to(stream, history, 80)
        past.bring_back("w0", "w1")
        await read_all(stream, history)
    history.check(oracle.outputs(PROMPT, PARAMS))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("num_other", [5, 100])  # the other journal is shorter than what was delivered, or longer
async def test_another_past_is_lost_history_and_never_another_text(cluster, past, oracle, num_other):
    (expected,) = oracle.outputs(PROMPT, PARAMS)
    async with cluster.client() as client:
        stream, history = client.generate(PROMPT, PARAMS), History()
        await read_to(stream, history, 40)
        past.save()
        await past.rewrite_tail(stream.request_id, [1] * num_other)
        await read_to(stream, history, 80)
        token = stream.resume_token
        past.bring_back("w0", "w1")
        with pytest.raises(errors.HistoryLost):
            await read_all(stream, history)
        assert tuple(history.tokens[0]) == expected.token_ids[: len(history.tokens[0])]
        for routers in ([0], [1]):
            async with cluster.client(routers) as other:
                with pytest.raises(errors.HistoryLost):
                    await read_all(other.attach(resume_token=token), History(starts=[len(history.tokens[0])]))
        await client.cancel(stream.request_id)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("victims", [("w0", "w1"), ()], ids=["all die", "the store dies"])
async def test_damage_inside_a_journal_is_lost_history_for_whoever_had_it(cluster, past, oracle, victims):
    """The server has no checksum over what it appends to its file, and loads another token without a word."""
    (expected,) = oracle.outputs(PROMPT, PARAMS)
    async with cluster.client() as client:
        stream, history = client.generate(PROMPT, PARAMS), History()
        await read_to(stream, history, 40)
        for name in ("store", *victims):
            cluster.kill(name)
        past.flip_bit(stream.request_id)
        for name in ("store", *victims):
            cluster.spawn(name)
        with pytest.raises(errors.HistoryLost):
            await read_all(stream, history)
        assert tuple(history.tokens[0]) == expected.token_ids[: len(history.tokens[0])]
        cluster.wait_ready()
        await client.cancel(stream.request_id)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_lost_record_is_lost_history_and_tokens_after_the_loss_are_good_everywhere(cluster, past, oracle):
    async with cluster.client([0]) as one:
        stream, history = one.generate(PROMPT, PARAMS), History()
        await read_to(stream, history, 40)
        token = stream.resume_token
        past.bring_back("r1")  # an empty store, and a router that knows no old key
        with pytest.raises(errors.HistoryLost):
            await read_all(stream, history)
        with pytest.raises(errors.HistoryLost):
            await read_all(one.attach(resume_token=token), History())
        async with cluster.client([1]) as two:
            with pytest.raises(errors.ForeignToken):
                await read_all(two.attach(resume_token=token), History())
            with pytest.raises(errors.NotFound):
                await read_all(two.attach(stream.request_id), History())
            await move_both_ways(one, two, oracle)


async def move_both_ways(one, two, oracle):
    """Streams that begin after the loss move between the router that had the old key and the one that never had it."""
    for seed, (first, second) in enumerate([(one, two), (two, one)]):
        params = replace(PARAMS, seed=seed, max_tokens=60)
        begun, history = first.generate(PROMPT, params), History()
        await read_to(begun, history, 20)
        async with second.attach(resume_token=begun.resume_token) as rest:
            await read_all(rest, history)
        history.check(oracle.outputs(PROMPT, params))
        await begun.aclose()
