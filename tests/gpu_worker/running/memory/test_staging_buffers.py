"""Buffers of a staging area: nobody has one twice, and whoever waits gets some."""

import threading

import pytest

from gpu_worker.running.memory.staged_blocks import StagingBuffers


def test_buffers_are_given_out_once():
    buffers = StagingBuffers(range(3, 7))
    first, second = buffers.claim(1), buffers.claim(3)
    assert sorted(first + second) == [3, 4, 5, 6]
    assert buffers.num_free == 0 and buffers.claim(0) == []
    buffers.give_back(second)
    assert sorted(buffers.claim(3)) == sorted(second)


def test_who_finds_too_few_waits_for_them():
    buffers = StagingBuffers(range(3))
    held, got = buffers.claim(2), []
    thread = threading.Thread(target=lambda: got.append(buffers.claim(2)))
    thread.start()
    buffers.give_back(held[:1])
    thread.join(10)
    assert len(got[0]) == 2 and buffers.num_free == 0


def test_waiting_has_an_end():
    buffers = StagingBuffers(range(2), patience_s=0.01)
    buffers.claim(1)
    with pytest.raises(TimeoutError, match="no buffers for 2 blocks"):
        buffers.claim(2)
    assert buffers.num_free == 1


def test_a_retired_buffer_is_not_given_out_and_who_needs_it_is_told_at_once():
    buffers = StagingBuffers(range(2), patience_s=60)
    (lost,) = buffers.claim(1)
    errors = []

    def wait_for_two():
        with pytest.raises(RuntimeError, match="2 blocks at once, of 1") as raised:
            buffers.claim(2)
        errors.append(raised.value)

    thread = threading.Thread(target=wait_for_two)
    thread.start()
    buffers.retire([lost])
    thread.join(10)
    assert errors and buffers.num_usable == 1
    assert buffers.claim(1) != [lost]
