"""The memory of a staging ring."""

import ctypes
import mmap

import numpy as np
import numpy.typing as npt
import pytest

from mooncake_hetero_tp.errors import ConfigError, LocalUsageError
from mooncake_hetero_tp.io.staging import SCRATCH_BYTES, RingSize, StagingRing, host_ring

SIZE = RingSize(slot_bytes=2 * mmap.PAGESIZE, slots=3)


def view_at(address: int, length_bytes: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * length_bytes).from_address(address))


def test_slots_lie_one_after_the_other_in_one_buffer() -> None:
    ring = host_ring(SIZE)
    buffer = ring.buffer
    assert buffer.length_bytes == SIZE.bytes == 6 * mmap.PAGESIZE + SCRATCH_BYTES
    assert ring.scratch + SCRATCH_BYTES == buffer.end
    assert [ring.address_of(slot) - buffer.address for slot in range(3)] == [0, SIZE.slot_bytes, 2 * SIZE.slot_bytes]
    ring.close()


def test_a_host_ring_is_zero_and_can_be_written() -> None:
    ring = host_ring(SIZE)
    memory = view_at(ring.buffer.address, SIZE.bytes)
    assert not memory.any()
    memory[:] = 7
    assert np.array_equal(view_at(ring.address_of(2), 5), [7] * 5)
    del memory
    ring.close()


@pytest.mark.parametrize("slot", [-1, 3])
def test_there_is_no_slot_outside(slot: int) -> None:
    ring = StagingRing(4096, SIZE, lambda: None)
    with pytest.raises(LocalUsageError, match=f"slot {slot} of a staging ring of 3"):
        ring.address_of(slot)


def test_the_memory_is_given_back_once() -> None:
    freed: list[int] = []
    ring = StagingRing(4096, SIZE, lambda: freed.append(1))
    ring.close()
    ring.close()
    assert freed == [1]


def test_an_impossible_size_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"staging_mib"):
        host_ring(RingSize(slot_bytes=2**50, slots=2**12))


def test_an_empty_ring_is_refused() -> None:
    with pytest.raises(LocalUsageError, match="at least 1"):
        StagingRing(4096, RingSize(4096, 0), lambda: None)
