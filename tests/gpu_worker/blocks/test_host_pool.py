"""The host pool's bookkeeping."""

import pytest

from gpu_worker.blocks.host_pool import HostPool
from octavo.request.errors import OutOfBlocks


def test_a_block_in_two_tables_is_copied_once() -> None:
    pool = HostPool(4)
    tables = pool.copy_out([[7, 8], [7, 9]])
    assert tables[0][0] == tables[1][0]
    assert sorted(block for block, _ in pool.copies_out()) == [7, 8, 9]
    pool.check_host_blocks(tables)
    with pytest.raises(OutOfBlocks):
        pool.copy_out([[1, 2]])
    pool.check_host_blocks(tables)
    pool.release(tables[0])
    pool.check_host_blocks(tables)
    pool.release(tables[1])
    assert pool.num_free == 4 and not pool.copies_out()


def test_what_is_being_read_is_free_only_after_the_step() -> None:
    pool = HostPool(2)
    (table,) = pool.copy_out([[5]])
    pool.end_step()
    host = table[0]
    pool.copy_in(host, 3)
    pool.release(table)
    assert pool.num_free == 1
    pool.check_host_blocks([])
    pool.end_step()
    assert pool.num_free == 2


def test_a_move_nobody_wants_any_more_is_not_made() -> None:
    pool = HostPool(2)
    pool.copy_in(0, 3)
    pool.cancel_copies_in([3])
    assert not pool.copies_in()
