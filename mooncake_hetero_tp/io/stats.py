"""Counters of one worker's transfers: totals since the last look, and one record per finished pull."""

from __future__ import annotations

import threading
from collections import deque

import msgspec

from mooncake_hetero_tp.types import Identity, RequestId, TransferId

_MAX_PULLS = 4096
"""Records kept until someone looks; older ones are dropped, the totals stay right."""


class PullRecord(msgspec.Struct, frozen=True):
    """One request's pull from one producer rank; times in seconds."""

    request_id: RequestId
    transfer_id: TransferId
    producer: Identity
    tokens: int
    bytes: int
    descriptors: int
    batches: int
    retries: int
    read_s: float
    """Binding, reading and clearing tails; of a staged pull, in all its chunks together, unpacking included."""
    total_s: float
    """From the request's start here to its report."""
    chunks: int = 0
    """0: it was read directly."""
    why: str = ""
    """Why it was read directly or staged, where there was a choice."""

    @property
    def mode(self) -> str:
        """`direct` or `staged`."""
        return "staged" if self.chunks else "direct"

    def __str__(self) -> str:
        """The log line; scripts read its `key=value` pairs."""
        producer = self.producer
        return (
            f"pulled request={self.request_id} bytes={self.bytes} descriptors={self.descriptors} "
            f"tokens={self.tokens} batches={self.batches} retries={self.retries} mode={self.mode} chunks={self.chunks} "
            f"read_ms={self.read_s * 1e3:.3f} total_ms={self.total_s * 1e3:.3f} "
            f"transfer={self.transfer_id} producer={producer.engine_id} producer_rank={producer.rank}"
            + (f" why={self.why!r}" if self.why else "")
        )


class TransferStats(msgspec.Struct):
    """What happened since the last look."""

    bytes_pulled: int = 0
    descriptors: int = 0
    batches: int = 0
    retries: int = 0
    """Engine calls that failed and were tried again with success."""
    replaced_sessions: int = 0
    pulls_staged: int = 0
    chunks: int = 0
    """Packed pieces that were read and unpacked."""
    chunks_packed: int = 0
    """Producer: packed for consumers to read."""
    gathers_failed: int = 0
    loads_done: int = 0
    loads_failed: int = 0
    loads_cancelled: int = 0
    reads_failed: int = 0
    sends_done: int = 0
    sends_expired: int = 0
    """Kept blocks that were freed because nobody claimed them, or a lease ran out."""
    frames_dropped: int = 0
    bad_frames: int = 0
    """Messages of peers that did not decode."""
    pulls: list[PullRecord] = []

    @property
    def is_empty(self) -> bool:
        return self == TransferStats()


class StatsBook:
    """Collects from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = TransferStats()
        self._pulls: deque[PullRecord] = deque(maxlen=_MAX_PULLS)

    def add(self, name: str, amount: int = 1) -> None:
        """Add to the counter `name` of TransferStats."""
        with self._lock:
            setattr(self._stats, name, getattr(self._stats, name) + amount)

    def pull(self, record: PullRecord) -> None:
        """Count a finished pull."""
        with self._lock:
            self._stats.bytes_pulled += record.bytes
            self._stats.descriptors += record.descriptors
            self._stats.batches += record.batches
            self._stats.retries += record.retries
            self._stats.pulls_staged += record.chunks > 0
            self._stats.chunks += record.chunks
            self._pulls.append(record)

    def take(self) -> TransferStats:
        """What was counted since the last call."""
        with self._lock:
            stats, self._stats = self._stats, TransferStats()
            stats.pulls = list(self._pulls)
            self._pulls.clear()
        return stats
