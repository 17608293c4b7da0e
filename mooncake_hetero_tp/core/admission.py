"""Which pulls a producer rank takes in, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mooncake_hetero_tp.core.leases import PullEntry, PullTable, Transfer, unreadable
from mooncake_hetero_tp.core.messages import GoneReason, Pull
from mooncake_hetero_tp.core.regions import Group
from mooncake_hetero_tp.core.sessions import Session
from mooncake_hetero_tp.core.states import Hold
from mooncake_hetero_tp.core.tombstones import Tombstones
from mooncake_hetero_tp.types import TransferId


@dataclass(frozen=True, kw_only=True, slots=True)
class ProducerConfig:
    """Times and table bounds of one producer rank; times in seconds."""

    keep_s: float = 480.0
    """How long kept blocks wait for their first Claim (VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT)."""
    lease_s: float = 30.0
    """How long a Claim or Renew holds the blocks."""
    clock_drift: float = 0.002
    """Largest relative difference of the two sides' clock rates; leases end later here by this much.
    NTP slews by at most 0.0005, crystals differ by less."""
    orphan_s: float = 60.0
    """How long a pull of an unknown transfer waits without a sign of its consumer, which sends one
    every `ConsumerConfig.heartbeat_s` (cap of vllm#51236)."""
    max_sessions: int = 4096
    max_pulls: int = 65536
    max_waiting: int = 16384
    """Pulls of transfers that are not known yet."""
    max_tombstones: int = 65536
    null_block: int | None = 0
    """Block id that stands for a dropped page (vLLM: 0)."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Looks at a producer machine's tables and changes nothing."""

    config: ProducerConfig
    groups: tuple[Group, ...]
    kept: Mapping[TransferId, Transfer]
    pulls: PullTable
    tombs: Tombstones

    def obstacle(self, session: Session, message: Pull) -> GoneReason | None:
        """Why a new pull cannot be taken in; None: it can."""
        transfer = self.kept.get(message.transfer_id)
        if len(message.ranges) != len(self.groups):
            return GoneReason.BAD_RANGES
        if transfer is None:
            return self._unkept(session, message)
        if transfer.state is Hold.ENDING:
            return transfer.end_reason
        if session.tag in transfer.released_by:
            return GoneReason.RELEASED
        if len(self.pulls) >= self.config.max_pulls:
            return GoneReason.OVERLOADED
        return self.unreadable(transfer, message)

    def unreadable(self, transfer: Transfer, pull: Pull | PullEntry) -> GoneReason | None:
        """Why its ranges cannot be read from the kept blocks; None: they can."""
        return unreadable(transfer, pull.ranges, self.groups, self.config.null_block)

    def _unkept(self, session: Session, message: Pull) -> GoneReason | None:
        tomb = self.tombs.get(message.transfer_id)
        if tomb is not None and (session.tag in tomb.released_by or not tomb.early):
            return tomb.reason
        full = self.pulls.waiting >= self.config.max_waiting or len(self.pulls) >= self.config.max_pulls
        return GoneReason.OVERLOADED if full else None
