"""What the rest of the package asks of a transfer engine, and the records that pass.

Mooncake's is in `engine.py`; a double that copies bytes inside this process is in `testing.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mooncake_hetero_tp.core.binding import Descriptors
from mooncake_hetero_tp.core.regions import Buffer
from mooncake_hetero_tp.errors import TransferError


class Deadline:
    """Until when a running read counts; moved by renewals and ended early by a stop, from other threads."""

    __slots__ = ("_at", "_stopped")

    def __init__(self, at: float) -> None:
        self._at = at
        self._stopped = False

    @property
    def at(self) -> float:
        """Clock value of the engine's clock, in seconds."""
        return self._at

    @property
    def stopped(self) -> bool:
        return self._stopped

    def extend(self, at: float) -> None:
        self._at = at

    def stop(self) -> None:
        """Start no further engine call."""
        self._stopped = True


@dataclass(slots=True)
class ReadTally:
    """What one read did."""

    bytes: int = 0
    descriptors: int = 0
    batches: int = 0
    retries: int = 0
    replaced_sessions: int = 0

    def count(self, batch: Descriptors, *, retries: int) -> None:
        """Add one finished batch."""
        self.batches += 1
        self.descriptors += batch.count
        self.bytes += batch.bytes
        self.retries += retries


class ReadFailed(TransferError):
    """A read that does not count.

    `may_still_write`: a call of it failed and what it left behind is not known dead; the memory must
    not be used again before `fence` has returned.
    """

    def __init__(self, message: str, *, may_still_write: bool = False) -> None:
        super().__init__(message)
        self.may_still_write = may_still_write


class TransferEngine(Protocol):
    """Moves bytes from a peer's registered memory into ours. All methods are thread-safe."""

    @property
    def transport_session(self) -> str:
        """What peers pass to `read` to read from this engine."""

    def register(self, buffers: Sequence[Buffer]) -> None:
        """Make memory usable for transfers, all or none; once per engine, before any read.

        Raises:
            TransferError: names the buffer, its size and address, and the code.
            ConfigError: the transport does not start with the operator's settings.
        """

    def read(self, transport_session: str, descriptors: Descriptors, *, deadline: Deadline) -> ReadTally:
        """Read `length[i]` bytes of the peer's `src[i]` into our `dst[i]`; blocks until done.

        When this returns, nothing of the read can write any more.

        Raises:
            ReadFailed: a call failed, or came back after the deadline, or the read was stopped.
        """

    def fence(self, transport_session: str) -> None:
        """Make sure that no failed read from this peer can write any more.

        Raises:
            TransferError: not reached in time; call again.
        """

    def close(self) -> bool:
        """Unregister everything and end all sessions; whether nothing can touch the memory any more. Idempotent."""
