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
ORDER, HIDDEN, BLOCKS = 1, 2, 3


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
    kind=st.integers(0, 7),
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
            order = struct.pack("=5q24x", 1, 0, 0, 0, 1)  # the logits of a row
            near.sendall(HEAD.pack(ORDER, 1, 64) + order + HEAD.pack(HIDDEN, 2, 64) + bytes(64))
            number += 2
        near.sendall(HEAD.pack(kind, number, size) + payload + bytes(max(0, min(size, 4000) - len(payload))))
        near.shutdown(socket.SHUT_RDWR)
        thread.join(30)
        assert team.trouble


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
