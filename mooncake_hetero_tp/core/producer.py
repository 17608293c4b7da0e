"""The producer rank's machine: sessions, kept transfers, pulls and their leases. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mooncake_hetero_tp.core.effects import Kept, ProducerEffect
from mooncake_hetero_tp.core.messages import ConsumerMessage
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.types import Identity, Mismatch, TransferId

Compare = Callable[[RankTable, RankTable], tuple[Mismatch, ...]]
"""`core.handshake.compare(producer, consumer)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProducerConfig:
    """Times and table bounds of one producer rank; times in seconds."""

    keep_s: float = 480.0
    """How long kept blocks wait for their first Claim (VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT)."""
    lease_s: float = 30.0
    """How long a Claim or Renew holds the blocks."""
    clock_drift: float = 0.002
    """Largest relative difference of the two sides' clock rates; leases end later here by this much."""
    orphan_s: float = 60.0
    """How long a pull of an unknown transfer waits without a sign of its consumer."""
    max_sessions: int = 4096
    max_pulls: int = 65536
    max_waiting: int = 16384
    max_tombstones: int = 65536
    null_block: int | None = 0
    """Block id that stands for a dropped page (vLLM: 0)."""


class ProducerMachine:
    """All protocol state of one producer rank. Single-threaded; every method returns at once."""

    def __init__(
        self,
        identity: Identity,
        table: RankTable,
        transport_session: str,
        config: ProducerConfig,
        *,
        draw: Callable[[], int],
        compare: Compare,
    ) -> None: ...

    def receive(self, peer: bytes, message: ConsumerMessage, now: float) -> list[ProducerEffect]:
        raise NotImplementedError

    def keep(self, kept: Kept, now: float) -> list[ProducerEffect]:
        raise NotImplementedError

    def mark_ready(self, transfer_id: TransferId, now: float) -> list[ProducerEffect]:
        """The GPU has written the kept blocks."""
        raise NotImplementedError

    def abort(self, transfer_id: TransferId, now: float) -> list[ProducerEffect]:
        raise NotImplementedError

    def tick(self, now: float) -> list[ProducerEffect]:
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        """When `tick` has something to do at the latest; None: nothing is timed."""
        raise NotImplementedError

    def close(self, now: float) -> list[ProducerEffect]:
        """Refuse what is new, tell waiters; granted leases run on (see `drained`)."""
        raise NotImplementedError

    @property
    def drained(self) -> bool:
        """Whether nothing is kept, waiting or leased."""
        raise NotImplementedError
