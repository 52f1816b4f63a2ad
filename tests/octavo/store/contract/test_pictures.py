"""The pictures of a sequence: there before it is accepted, and no longer than its prompt."""

from octavo.request.ids import RequestId, sequence_id
from octavo.request.sampling import FinishReason


async def test_pictures_are_kept_as_long_as_the_prompt(bench, new):
    store, request = bench.store, new(pictures=f"{'d' * 32}:0:1:1,{'e' * 32}:1:1:1")
    seq_id, other = request.seq_id, sequence_id("", RequestId("other"))
    for digest, pixels in (("d", b"\xff\0"), ("e", b"2")):
        assert await store.read_picture(seq_id, digest) == b""
        assert await store.keep_picture(seq_id, digest, pixels)
    epoch = await bench.run(request)
    assert not await store.keep_picture(seq_id, "f", b"3"), "what is accepted has all of its pictures"
    found = [await bench.another().read_picture(seq_id, digest) for digest in "def"]
    assert found == [b"\xff\0", b"2", b""]
    assert await store.read_picture(other, "d") == b""
    assert not await store.forget(seq_id)
    await bench.append(seq_id, epoch, 0, [5], finish=FinishReason.STOP)
    assert await store.read_picture(seq_id, "d") == b""
    assert await store.forget(seq_id) and await store.forget(other)
    assert await store.read(seq_id) is None
