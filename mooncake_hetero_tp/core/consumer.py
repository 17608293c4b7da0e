"""The consumer rank's machine: engines it knows, requests it loads and their pulls. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mooncake_hetero_tp.core.effects import (
    ConsumerEffect,
    Plan,
    PullRequest,
    ReadId,
    ReadOutcome,
    ResolvedEngine,
    ResolveFailed,
)
from mooncake_hetero_tp.core.messages import ProducerMessage
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.types import Identity, Rank, RequestId

Planner = Callable[[RankTable, Mapping[Rank, RankTable]], Mapping[Rank, Plan]]
"""Plans and proves: (own table, tables of all ranks of the producer engine) -> plan per rank to read from.

Raises IncompatiblePeer or PlanError; both refuse the engine by name.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerConfig:
    """Times and table bounds of one consumer rank; times in seconds."""

    deadline_s: float = 420.0
    """A started request has ended by then; less than the producer's keep time."""
    connect_timeout_s: float = 30.0
    """Bound of resolving an engine and shaking hands with all its ranks."""
    resend_s: float = 0.25
    """First repetition of an unanswered message; doubles up to `resend_max_s`."""
    resend_max_s: float = 4.0
    heartbeat_s: float = 10.0
    """How often a pull that the producer lets wait says that it is still there."""
    silence_s: float = 10.0
    """A producer rank that answers nothing for so long is taken for gone."""
    refuse_cache_s: float = 30.0
    """How long a refusal stands before the engine is asked again."""
    max_requests: int = 65536
    max_engines: int = 1024


class ConsumerMachine:
    """All protocol state of one consumer rank. Single-threaded; every method returns at once."""

    def __init__(
        self,
        identity: Identity,
        table: RankTable,
        config: ConsumerConfig,
        *,
        draw: Callable[[], int],
        planner: Planner,
    ) -> None: ...

    def start(self, request: PullRequest, now: float) -> list[ConsumerEffect]:
        raise NotImplementedError

    def cancel(self, request_id: RequestId, now: float) -> list[ConsumerEffect]:
        """The request was aborted by vLLM while it was loading; unknown ids are ignored."""
        raise NotImplementedError

    def resolved(self, answer: ResolvedEngine | ResolveFailed, now: float) -> list[ConsumerEffect]:
        raise NotImplementedError

    def receive(self, address: str, message: ProducerMessage, now: float) -> list[ConsumerEffect]:
        raise NotImplementedError

    def read_finished(self, read_id: ReadId, outcome: ReadOutcome, now: float) -> list[ConsumerEffect]:
        raise NotImplementedError

    def read_fenced(self, read_id: ReadId, now: float) -> list[ConsumerEffect]:
        """Nothing of this read can write any more (answer to FenceRead)."""
        raise NotImplementedError

    def tick(self, now: float) -> list[ConsumerEffect]:
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        """When `tick` has something to do at the latest; None: nothing is timed."""
        raise NotImplementedError

    def close(self, now: float) -> list[ConsumerEffect]:
        """End all requests as failed; those with a running read report when it has returned."""
        raise NotImplementedError

    @property
    def drained(self) -> bool:
        """Whether every started request has been reported."""
        raise NotImplementedError
