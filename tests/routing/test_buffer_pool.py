"""The buffer pool: it never lends what is in use, and never keeps more than it may."""

import gc

import pytest
import torch

from tieline import Experts, TielineError
from tieline.routing import buffer_pool
from tieline.routing.buffer_pool import BufferPool, set_pool_capacity, take_buffer

pytestmark = pytest.mark.cpu("the pool holds memory of the CPU")

MEGABYTE = 1 << 20


def test_memory_comes_back_when_the_last_view_dies_and_is_lent_again():
    pool = BufferPool(8 * MEGABYTE)
    first = pool.take((MEGABYTE // 2,), torch.float32)
    address, view = first.data_ptr(), first[10:20]
    del first
    assert pool.idle_bytes == 0  # the view still needs the storage
    other = pool.take((MEGABYTE // 2,), torch.float32)
    assert other.data_ptr() != address
    del view
    gc.collect()
    assert pool.take((MEGABYTE // 4,), torch.float64).data_ptr() == address


def test_idle_memory_never_exceeds_the_capacity():
    pool = BufferPool(5 * MEGABYTE)
    lent = [pool.take((2 * MEGABYTE,), torch.uint8) for _ in range(4)]
    del lent
    assert pool.idle_bytes == 4 * MEGABYTE
    pool.shrink(MEGABYTE)
    assert pool.idle_bytes == 0


def test_a_much_larger_idle_block_is_not_wasted_on_a_small_request():
    pool = BufferPool(32 * MEGABYTE)
    address = pool.take((16 * MEGABYTE,), torch.uint8).data_ptr()
    assert pool.take((4 * MEGABYTE,), torch.uint8).data_ptr() != address
    assert pool.take((14 * MEGABYTE,), torch.uint8).data_ptr() == address


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_buffers_are_aligned_and_shaped_as_asked(dtype):
    buffer = BufferPool(64 * MEGABYTE).take((600, 3000), dtype)
    assert buffer.data_ptr() % 64 == 0
    assert buffer.shape == (600, 3000)
    assert buffer.dtype == dtype
    assert buffer.is_contiguous()


def test_small_or_unpooled_requests_are_plain_tensors():
    pool = BufferPool(0)
    del (lent := [pool.take((4 * MEGABYTE,), torch.uint8)])[0]
    assert pool.idle_bytes == 0
    assert not lent
    assert take_buffer((3, 4), torch.zeros(1, dtype=torch.float64)).dtype == torch.float64


def test_gradients_of_successive_steps_do_not_share_memory_while_both_live():
    experts, x, weights = Experts(4, 256, 512), torch.randn(32, 256), torch.rand(32, 4)
    experts(x, weights).sum().backward()
    kept = experts.w_in.grad
    copy = kept.clone()
    experts.zero_grad()
    experts(2 * x, weights).sum().backward()
    assert torch.equal(kept, copy)
    assert kept.data_ptr() != experts.w_in.grad.data_ptr()


def test_the_capacity_is_checked_and_zero_turns_the_pool_off():
    try:
        with pytest.raises(TielineError, match="got -1"):
            set_pool_capacity(-1)
        set_pool_capacity(0)
        assert buffer_pool._POOL.idle_bytes == 0
    finally:
        set_pool_capacity(256 << 20)
