"""What a host is sent by the front of its group: frames of no kind, number or size that can be are refused."""

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from effort import draws
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SIZES = {"vocab": 64, "hidden": 16, "inner": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "eps": 1e-5, "scale": 1.0}
NONE, HALVES = (0, 0), [(0, 32), (32, 32)]
TOKENS, PLAN_BYTES = 8, 4096
HEAD = struct.Struct("=IIq")  # kind, number, bytes
COLUMNS, ORDER, HIDDEN, BLOCKS, WANTED, ADAPTER, QUESTIONS, ANSWERS = 0, 1, 2, 3, 6, 7, 8, 9
ONE_ROW = struct.pack("=5q24x", 1, 0, 0, 0, 1)  # an order of its logits
QUESTION = struct.Struct("=Qf4xqf4x3i2f3i")
ROOM = torch.zeros(4096, dtype=torch.uint8)  # of adapters


def memory_of(extension: ModuleType) -> torch.Tensor:
    size = extension.Llama.team_bytes(SIZES, TOKENS, PLAN_BYTES)
    whole = torch.zeros(size + 64, dtype=torch.uint8)
    return whole[-whole.data_ptr() % 64 :][:size]


def decoder_of(
    extension: ModuleType,
    team: Any,
    fd: int,
    layers: Sequence[tuple[int, int]] = (NONE, NONE),
    heads: Sequence[tuple[int, int]] = (),
) -> Any:
    """One without layers, of a host other than the front's."""
    head, matrix, turns = torch.ones(32, 16), torch.ones(64, 16), torch.ones(16, 4)
    nothing = {f"host_{name}": [NONE, NONE] for name in ("hidden", "inner", "expert_inner", "shared_inner")}
    own = dict.fromkeys(("kv_heads", "hidden", "inner", "layers"), NONE)
    hosts = extension.GroupHosts(team, [fd, -1], 1, [NONE, NONE], layers)
    share = {"team": team, "hosts": hosts, "tokens": TOKENS, "plan_bytes": PLAN_BYTES}
    share |= {**own, "heads": heads, "vocab": (32, 32), **nothing, "host_vocab": HALVES}
    share["loras"] = extension.LoraRoom(ROOM)
    weights = (extension.Weight(matrix, "f32", 64, 16), extension.Weight(head, "f32", 32, 16))
    return extension.Llama(SIZES, *weights, torch.ones(16), turns, turns, [], share=share)


@contextmanager
def follower(extension: ModuleType) -> Iterator[tuple[socket.socket, Any, torch.Tensor, threading.Thread]]:
    """The front's end of a stream to a host that serves a decoder without layers; its team, its arena, its thread."""
    near, far = socket.socketpair()
    team = extension.Team(memory_of(extension), 0, 1, 1.0)
    decoder = decoder_of(extension, team, far.fileno())
    arena = torch.zeros(2, 3, 8)
    thread = threading.Thread(target=lambda: decoder.serve(extension.Kv([]), arena))
    thread.start()
    try:
        yield near, team, arena, thread
    finally:
        near.close()
        thread.join(30)
        far.close()
        assert not thread.is_alive()


@settings(max_examples=draws(20, 200), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    ordered=st.booleans(),
    kind=st.integers(0, ANSWERS + 1),
    number=st.sampled_from([1, 1, 1, 2]),
    size=st.one_of(st.integers(-2, 2000), st.integers(-(1 << 62), 1 << 62)),
    numbers=st.lists(st.one_of(st.integers(-3, 70), st.integers(-(1 << 62), 1 << 62)), max_size=20),
)
def test_no_frame_is_taken_for_another(
    extension: ModuleType, ordered: bool, kind: int, number: int, size: int, numbers: list[int]
) -> None:
    """Alone, or where it is to say which logits are wanted."""
    with follower(extension) as (near, team, _, thread):
        payload = struct.pack(f"={len(numbers)}q", *numbers)
        if ordered:
            near.sendall(HEAD.pack(ORDER, 1, 64) + ONE_ROW + HEAD.pack(HIDDEN, 2, 64) + bytes(64))
            number += 2
        near.sendall(HEAD.pack(kind, number, size) + payload + bytes(max(0, min(size, 4000) - len(payload))))
        near.shutdown(socket.SHUT_RDWR)
        thread.join(30)
        assert team.trouble


def question(kind: int, told: bytes = b"", **others: float) -> bytes:
    """About all that a host has of its row."""
    fields = {"place": 0, "logit": -float("inf"), "id": (1 << 63) - 1, "least": 0.0, "kind": kind, "row": 0}
    fields |= {"masked": 0, "highest": 0.0, "factor": 1.0, "buckets": 256, "host": 1, "known": len(told) // 8}
    return QUESTION.pack(*(fields | others).values()) + told


def received(stream: socket.socket, size: int) -> bytes:
    return stream.recv(size, socket.MSG_WAITALL)


MASS, MASSES, BUCKET, TOKEN, TOKENS = range(5)
ALL = 31 << 40  # what a host has of 32 tokens that are all alike, when it has sent one
LAST = struct.pack("=2if", 0, 1, 0.0) + struct.pack("=i", 63)


CASES: list[tuple[bytes, bytes | None]] = [
    (question(MASS), struct.pack("=2iQ", 1, 0, ALL)),
    (question(MASSES), struct.pack("=2i2Q", 257, 0, ALL, ALL) + bytes(255 * 8)),
    (question(BUCKET, buckets=3), struct.pack("=2i", 0, 0)),
    (question(TOKEN, place=ALL - 1), LAST),
    (question(TOKEN, struct.pack("=fi", -1.0, 33), place=ALL - (1 << 40)), LAST),
    (question(TOKEN, host=0), bytes(8)),
    (question(TOKENS, logit=0.0, id=33), struct.pack("=2i", 0, 1) + struct.pack("=fi", 0.0, 33)),
    (question(MASS, row=1), None),
    (question(MASS, row=-1), None),
    (question(MASS, highest=-0.5), None),
    (question(MASS, highest=float("nan")), None),
    (question(MASS, factor=0.0), None),
    (question(MASSES, buckets=255), None),
    (question(TOKEN, place=ALL), None),
    (question(TOKEN, struct.pack("=fi", 0.0, 31)), None),
    (question(TOKEN, struct.pack("=fi", 0.5, 40)), None),
    (question(MASS, known=-1), None),
    (question(MASS, known=1), None),
    (question(5), None),
    (b"short", None),
]


@pytest.mark.parametrize(("asked", "said"), CASES, ids=range(len(CASES)))
def test_a_host_answers_what_a_front_asks_and_breaks_off_at_all_else(
    extension: ModuleType, asked: bytes, said: bytes | None
) -> None:
    with follower(extension) as (near, team, _, thread):
        wanted = struct.pack("=5i", 1, 0, 1, 0, 0)
        near.sendall(HEAD.pack(ORDER, 1, 64) + ONE_ROW + HEAD.pack(HIDDEN, 2, 64) + bytes(64))
        near.sendall(HEAD.pack(WANTED, 3, len(wanted)) + wanted)
        assert received(near, 24) == HEAD.pack(COLUMNS, 1, 8) + struct.pack("=fi", 0.0, 32)
        near.sendall(HEAD.pack(QUESTIONS, 4, len(asked)) + asked)
        if said is not None:
            assert received(near, 16 + len(said)) == HEAD.pack(ANSWERS, 2, len(said)) + said
            near.sendall(HEAD.pack(QUESTIONS, 5, 0))
        near.shutdown(socket.SHUT_RDWR)
        thread.join(30)
        ended = "the connection to host 0 has ended" if said is not None else "host 0 has sent what is not expected"
        assert team.trouble.startswith(ended)


@pytest.mark.parametrize(
    ("said", "good"),
    [
        (struct.pack("=2iQ", 1, 0, ALL), True),
        (struct.pack("=2iQ", 1, 0, ALL) + b"more", False),
        (struct.pack("=2i2Q", 2, 0, ALL, ALL), False),
        (struct.pack("=2iQfi", 1, 1, ALL, 0.0, 40), False),
        (struct.pack("=2i", 0, 0), False),
        (struct.pack("=2i", -1, 0), False),
        (struct.pack("=2i", 1 << 30, 0), False),
        (b"", False),
    ],
    ids=range(8),
)
def test_a_front_takes_no_answer_that_cannot_be(extension: ModuleType, said: bytes, good: bool) -> None:
    """Of a row whose log probabilities are wanted."""
    near, far = socket.socketpair()
    with near, far:
        team = extension.Team(memory_of(extension), 0, 1, 1.0)
        hosts = extension.GroupHosts(team, [-1, far.fileno()], 0, [NONE, NONE], [NONE, NONE])
        order, off, number = extension.TeamOrder(team, TOKENS, PLAN_BYTES), torch.zeros(1), torch.zeros(1).long()
        drawn, totals = torch.zeros((2, 1), dtype=torch.int64)
        given = {"temperature": off, "top_k": off.int(), "top_p": off + 1, "min_p": off, "counts": off.int()}
        given |= dict.fromkeys(("rows", "seed", "branch", "index"), number)
        wanted = extension.WantedLogits(1, 64, drawn, totals, **given)
        order.order_logits(1)
        near.sendall(HEAD.pack(COLUMNS, 1, 8) + struct.pack("=fi", 0.0, 32))
        near.sendall(HEAD.pack(ANSWERS, 2, len(said)) + said)
        assert hosts.tell(order, torch.zeros(64, 16), wanted)
        assert hosts.collect(torch.zeros(1, 64), HALVES) == good
        assert totals.tolist() == [64 << 40 if good else 0]
        assert team.trouble == "" or team.trouble.startswith("host 1 has sent what is not expected")


def test_blocks_are_put_where_they_belong(extension: ModuleType) -> None:
    """The heads that the host has."""
    near, far = socket.socketpair()
    with near, far:
        team, arena = extension.Team(memory_of(extension), 0, 1, 1.0), torch.zeros(2, 3, 2, 4)
        hosts = extension.GroupHosts(team, [far.fileno(), -1], 1, [(0, 1), (1, 1)], [(0, 2), (0, 2)])
        ids, rows = [2, 0], torch.arange(2 * 2 * 4, dtype=torch.float32)
        payload = struct.pack("=3q", len(ids), *ids) + rows.numpy().tobytes()
        near.sendall(HEAD.pack(BLOCKS, 1, len(payload)) + payload)
        wrong = struct.pack("=2q", 1, 7) + bytes(32)  # no block
        near.sendall(HEAD.pack(BLOCKS, 2, len(wrong)) + wrong)
        assert not hosts.hear(extension.TeamOrder(team, TOKENS, PLAN_BYTES), torch.zeros(64, 16), arena)
    assert torch.equal(arena[:, ids, 1].transpose(0, 1), rows.view(2, 2, 4))
    assert not arena[:, :, 0].any() and not arena[:, 1].any()
    assert team.trouble.startswith("host 0 has sent what is not expected")


def test_adapters_are_put_where_they_belong_and_nowhere_else(extension: ModuleType) -> None:
    for place in (64, 4096 - 16, 4096 - 15, -8, 1 << 62):
        with follower(extension) as (near, team, _, thread):
            ROOM.zero_()
            near.sendall(HEAD.pack(ADAPTER, 1, 24) + struct.pack("=q", place) + bytes(range(1, 17)))
            near.shutdown(socket.SHUT_RDWR)
            thread.join(30)
            fits = 0 <= place <= 4096 - 16
            assert ("what is not expected" not in team.trouble) == fits
            assert ROOM.nonzero().flatten().tolist() == ([*range(place, place + 16)] if fits else [])


@pytest.mark.parametrize(
    ("layers", "parts", "offset", "rows"),
    [
        (-1, 0, 0, 0),
        (9, 0, 0, 0),
        (1, 5, 0, 0),
        (1, -1, 0, 0),
        (1, 1, 4090, 2),
        (1, 1, -8, 1),
        (1, 1, 0, 1 << 60),
        (1, 1, 0, -1),
    ],
)
def test_an_adapter_that_no_front_has_put_there_is_none(
    extension: ModuleType, layers: int, parts: int, offset: int, rows: int
) -> None:
    near, far = socket.socketpair()
    with near, far:
        decoder = decoder_of(extension, extension.Team(memory_of(extension), 0, 1, 1.0), far.fileno())
        weight = struct.pack("=8x4q8x", offset, rows, 4, 4)
        table = struct.pack("=qqd", 7, layers, 1.0) + weight + struct.pack("=q", parts) + weight + bytes(1200)
        near.sendall(HEAD.pack(ADAPTER, 1, 8 + len(table)) + struct.pack("=q", 64) + table)
        order = struct.pack("=7q8x", 0, 1, 1, 1, 0, 1, 1)  # a step of a token, with an adapter
        arrays = bytes(6 * 64 + 64) + struct.pack("=3q", 7, 64, 1) + bytes(40)
        near.sendall(HEAD.pack(ORDER, 2, len(order) + len(arrays)) + order + arrays)
        with pytest.raises(ValueError, match=r"^loras?: "):
            decoder.serve(extension.Kv([]), torch.zeros(2, 3, 8))


def test_what_are_no_links_and_no_layers_of_hosts_is_refused_by_name(extension: ModuleType) -> None:
    team = extension.Team(memory_of(extension), 0, 1, 1.0)
    for fds, host, field in (([-1], 0, "fds"), ([5, 6], 0, "fds"), ([-1, 5], 2, "host"), ([-1, 5], -1, "host")):
        with pytest.raises(ValueError, match=f"^{field}: "):
            extension.GroupHosts(team, fds, host, [NONE, NONE], [NONE, NONE])
    none, far = "has a span of nothing", 1 << 62
    wrong = [([NONE], "has no span for each host"), ([(0, 1), NONE], "has hosts whose layers do not follow each other")]
    for layers, says in [*wrong, ([(0, -1), (-1, 1)], none), ([(0, far), (far, far)], none)]:
        with pytest.raises(ValueError, match=f"^layers: {says}"):
            decoder_of(extension, team, 0, layers)
    with pytest.raises(ValueError, match=r"^share: has layers that are not in those of its host"):
        decoder_of(extension, team, 0, [(0, 1), (1, 1)])
    for heads in ([NONE], [NONE, (0, 1), NONE], [(-1, 1), NONE, NONE], [NONE, NONE, (far, far)]):
        with pytest.raises(ValueError, match=r"^share: has heads that are not those of its host"):
            decoder_of(extension, team, 0, heads=heads)
