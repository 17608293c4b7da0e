"""The consumer scheduler's machine: one idempotent Release per transfer to every producer rank. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mooncake_hetero_tp.core.effects import ReleaserEffect, ResolvedEngine, ResolveFailed
from mooncake_hetero_tp.core.messages import ReleaseAck
from mooncake_hetero_tp.types import EngineId, TransferId


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaserConfig:
    """Times and table bounds of one consumer scheduler; times in seconds."""

    deadline_s: float = 480.0
    """When a release that nobody acknowledges is given up (the producer has expired it by then)."""
    resend_s: float = 0.25
    resend_max_s: float = 8.0
    refresh_s: float = 10.0
    """A rank that acknowledges nothing for so long has its engine resolved again, once per release."""
    cache_s: float = 60.0
    """How long an engine's addresses are used before they are asked for again."""
    max_releases: int = 65536
    max_engines: int = 1024


class ReleaserMachine:
    """Releases transfers on behalf of one consumer engine (`own_engine`, its own vLLM engine id)."""

    def __init__(self, own_engine: EngineId, config: ReleaserConfig, *, draw: Callable[[], int]) -> None: ...

    def release(self, transfer_id: TransferId, engine_id: EngineId, bootstrap: str, now: float) -> list[ReleaserEffect]:
        """`engine_id` and `bootstrap` name the producer engine."""
        raise NotImplementedError

    def resolved(self, answer: ResolvedEngine | ResolveFailed, now: float) -> list[ReleaserEffect]:
        raise NotImplementedError

    def receive(self, address: str, message: ReleaseAck, now: float) -> list[ReleaserEffect]:
        raise NotImplementedError

    def tick(self, now: float) -> list[ReleaserEffect]:
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        """When `tick` has something to do at the latest; None: nothing is timed."""
        raise NotImplementedError

    def close(self, now: float) -> list[ReleaserEffect]:
        """Send every outstanding release once more and forget it."""
        raise NotImplementedError

    @property
    def drained(self) -> bool:
        """Whether every release was acknowledged or given up."""
        raise NotImplementedError
