"""The memory of a staging ring: slots of one size in one registered, pre-touched allocation.

Who may use which slot when is decided in `core/slots.py`; here a slot is a number and an address. Touched once at
the start, because gathering into memory that was never touched runs at a quarter of the speed (page faults).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from mooncake_hetero_tp.core.regions import Buffer
from mooncake_hetero_tp.errors import ConfigError, LocalUsageError

SCRATCH_BYTES: Final = 1 << 20
"""Behind the slots: where bytes are read to that nobody wants, to measure a path."""


@dataclass(frozen=True, slots=True)
class RingSize:
    """`slots` slots of `slot_bytes` each."""

    slot_bytes: int
    slots: int

    @property
    def bytes(self) -> int:
        """All that is allocated and registered."""
        return self.slot_bytes * self.slots + SCRATCH_BYTES


class StagingRing:
    """One side's slots. Whoever allocated the memory keeps it alive until `close`."""

    def __init__(self, address: int, size: RingSize, free: Callable[[], None]) -> None:
        """`address`: of `size.bytes` bytes that `free` gives back."""
        if min(address, size.slot_bytes, size.slots) < 1:
            raise LocalUsageError(f"a staging ring of {size} at {address:#x}: all must be at least 1")
        self._address = address
        self._free = free
        self.size = size

    @property
    def buffer(self) -> Buffer:
        """What is registered with the transfer engine."""
        return Buffer(self._address, self.size.bytes)

    @property
    def scratch(self) -> int:
        """Where `SCRATCH_BYTES` may be written that nobody reads."""
        return self._address + self.size.slot_bytes * self.size.slots

    def address_of(self, slot: int) -> int:
        """Where a slot begins.

        Raises:
            LocalUsageError: no such slot.
        """
        if not 0 <= slot < self.size.slots:
            raise LocalUsageError(f"slot {slot} of a staging ring of {self.size.slots}")
        return self._address + slot * self.size.slot_bytes

    def close(self) -> None:
        """Give the memory back; only when no transfer can touch it any more. Idempotent."""
        free, self._free = self._free, _nothing
        free()


def _nothing() -> None:
    """The memory was given back already."""


def host_ring(size: RingSize) -> StagingRing:
    """A ring in host memory, page-aligned, every page touched.

    Raises:
        ConfigError: the system does not give that much memory.
    """
    try:
        memory = mmap.mmap(-1, size.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"no memory for a staging ring of {size.slots} slots of {size.slot_bytes} bytes: {error}; "
            "lower staging_mib, or set it to 0 to do without"
        ) from error
    touched = np.frombuffer(memory, np.uint8)
    touched[:: mmap.PAGESIZE] = 0
    address = touched.ctypes.data
    del touched  # or the mapping could not be closed
    return StagingRing(address, size, memory.close)
