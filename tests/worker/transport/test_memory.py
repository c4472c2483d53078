import gc
import platform

import torch

from worker.transport.memory import BufferPool, keep_message_buffers


def test_message_buffers_are_kept_where_the_c_library_can() -> None:
    assert keep_message_buffers() is (platform.libc_ver()[0] == "glibc")


def address(data: memoryview) -> int:
    return torch.frombuffer(data, dtype=torch.uint8).data_ptr()


def test_a_block_is_used_again_once_the_last_view_of_it_is_gone() -> None:
    pool = BufferPool(least_bytes=100)
    data = pool.allocate(100)
    place, view = address(data), torch.frombuffer(data[8:24], dtype=torch.float32)[1:]
    del data
    gc.collect(0)
    assert pool.spare_bytes == 0
    assert address(pool.allocate(100)) != place
    gc.collect(0)
    view.fill_(1.0)
    del view
    gc.collect(0)
    assert pool.spare_bytes == 200
    first, second = pool.allocate(100), pool.allocate(100)
    assert place in {address(first), address(second)}
    assert pool.spare_bytes == 0


def test_only_a_block_of_the_same_size_serves() -> None:
    pool = BufferPool(least_bytes=100)
    pool.allocate(200)
    assert len(pool.allocate(101)) == 101
    gc.collect(0)
    assert pool.spare_bytes == 301


def test_blocks_are_kept_up_to_a_bound_the_oldest_go_first() -> None:
    pool = BufferPool(least_bytes=100, most_bytes=450)
    held = [pool.allocate(size) for size in (100, 200, 300)]
    while held:
        del held[0]
        gc.collect(0)
    assert pool.spare_bytes == 300


def test_small_blocks_are_left_to_the_c_library() -> None:
    pool = BufferPool(least_bytes=100)
    pool.allocate(99)
    gc.collect(0)
    assert pool.spare_bytes == 0


def test_released_blocks_serve_no_more_and_those_in_use_come_back() -> None:
    pool = BufferPool(least_bytes=100)
    used = pool.allocate(100)
    pool.allocate(200)
    gc.collect(0)
    pool.release()
    assert pool.spare_bytes == 0
    del used
    gc.collect(0)
    assert pool.spare_bytes == 100
