"""Producer, consumer and releaser machines wired by hand: tables, identities and a post office for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import numpy as np

from mooncake_hetero_tp.core.codec import decode_from_consumer, decode_from_producer, encode
from mooncake_hetero_tp.core.consumer import ConsumerConfig, ConsumerMachine
from mooncake_hetero_tp.core.effects import (
    Kept,
    PullRequest,
    Reply,
    Report,
    Resolve,
    ResolvedEngine,
    Send,
    StartRead,
)
from mooncake_hetero_tp.core.messages import Offer
from mooncake_hetero_tp.core.producer import ProducerConfig, ProducerMachine
from mooncake_hetero_tp.core.regions import Group, RankTable
from mooncake_hetero_tp.core.shelf import Ring
from mooncake_hetero_tp.types import (
    EngineId,
    Identity,
    Incarnation,
    Mismatch,
    Rank,
    RequestId,
    Severity,
    TokenRange,
    TransferId,
)

Effect = TypeVar("Effect")

PREFILL = EngineId("prefill-engine")
DECODE = EngineId("decode-engine")
BOOTSTRAP = "10.0.0.1:8998"
MISFIT = Mismatch("dtype", "bfloat16", "float32", Severity.REFUSE, "values mean something else", "set one --dtype")


def rank_table(tp: int = 1, groups: Sequence[Group] = (Group(0, "attention", 16, 16),)) -> RankTable:
    """A table without regions: the machines look at groups and sizes only."""
    return RankTable(tp, 1, "LBHNC", {}, tuple(groups), (), ())


def identity(engine: EngineId, tp: int = 0, incarnation: str = "00000000000000aa") -> Identity:
    return Identity(engine, Incarnation(incarnation), Rank(tp=tp))


def block_ids(*ids: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(ids, np.int32)


def only(effects: Sequence[Any], kind: type[Effect]) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def replies(effects: Sequence[Any]) -> list[Any]:
    return [effect.message for effect in only(effects, Reply)]


def sends(effects: Sequence[Any]) -> list[Any]:
    return [effect.message for effect in only(effects, Send)]


def kept(
    request: str = "p-1",
    transfer: str = "xfer-1",
    *,
    blocks: Sequence[int] = (4, 5, 6),
    tokens: int = 48,
    ready: bool = True,
) -> Kept:
    return Kept(RequestId(request), TransferId(transfer), (block_ids(*blocks),), tokens, ready)


def pull_request(
    request: str = "d-1",
    transfer: str = "xfer-1",
    *,
    tokens: tuple[int, int] = (0, 40),
    blocks: Sequence[int] = (1, 2, 3),
) -> PullRequest:
    return PullRequest(
        RequestId(request),
        TransferId(transfer),
        PREFILL,
        BOOTSTRAP,
        (TokenRange(*tokens),),
        (block_ids(*blocks),),
    )


class Numbers:
    """Draws 1, 2, 3, ... instead of random numbers."""

    def __init__(self, first: int = 1) -> None:
        self._numbers = count(first)

    def __call__(self) -> int:
        return next(self._numbers)


def producer_machine(tp: int = 0, *, tp_size: int = 1, incarnation: str = "00000000000000aa", **options: Any) -> Any:
    """A producer rank; `options` override its config, or `table`, `compare`, `validate`, `draw`, `ring`."""
    extra = {name: options.pop(name) for name in ("compare", "validate", "draw", "table", "ring") if name in options}
    return ProducerMachine(
        identity(PREFILL, tp, incarnation),
        extra.pop("table", rank_table(tp_size)),
        f"10.0.0.1:{7000 + tp}",
        ProducerConfig(**{"keep_s": 100.0, "lease_s": 10.0, "orphan_s": 20.0, **options}),
        draw=extra.pop("draw", Numbers(1000 * (tp + 1))),
        **{"compare": lambda _mine, _theirs: (), "validate": lambda _table: None, **extra},
    )


class WholePlan:
    """Stands in for a PairPlan that reads everything."""

    def producer_ranges(self, ranges: tuple[TokenRange, ...]) -> tuple[TokenRange, ...]:
        return ranges


def plan_all(_own: RankTable, tables: Mapping[Rank, RankTable]) -> dict[Rank, WholePlan]:
    return {rank: WholePlan() for rank in tables}


def consumer_machine(tp: int = 0, **options: Any) -> ConsumerMachine:
    """A consumer rank; `options` override its config, or `table`, `planner`, `validate`, `draw`, `cuts`."""
    extra = {name: options.pop(name) for name in ("planner", "validate", "draw", "table", "cuts") if name in options}
    config = {
        "deadline_s": 80.0,
        "connect_timeout_s": 12.0,
        "resend_s": 0.5,
        "resend_max_s": 2.0,
        "heartbeat_s": 5.0,
        "silence_s": 6.0,
        "refuse_cache_s": 8.0,
    }
    return ConsumerMachine(
        identity(DECODE, tp, "00000000000000dd"),
        extra.pop("table", rank_table()),
        ConsumerConfig(**{**config, **options}),
        draw=extra.pop("draw", Numbers(50)),
        **{"planner": plan_all, "validate": lambda _table: None, "cuts": lambda _plan: (), **extra},
    )


def ring(slot_bytes: int = 100, slots: int = 4) -> Ring:
    """A producer's ring whose slots lie 1000 bytes apart."""
    return Ring(Offer(slot_bytes, slots), lambda slot: 1000 * (slot + 1))


@dataclass
class Pair:
    """One consumer rank and the producer ranks of one engine, with everything that is on its way between them.

    `deliver` carries messages and bootstrap answers until nothing is under way; what the consumer asks of
    its driver stays in `effects`, what the producers ask of theirs in `told`.
    """

    consumer: ConsumerMachine = field(default_factory=consumer_machine)
    producers: dict[str, Any] = field(default_factory=lambda: {"p0:1": producer_machine()})
    now: float = 0.0
    effects: list[Any] = field(default_factory=list)
    told: list[Any] = field(default_factory=list)
    carried: list[tuple[str, int]] = field(default_factory=list)
    """(message name, bytes of its frame) of everything that was carried."""
    lose: set[str] = field(default_factory=set)
    """Names of message types that are lost."""

    def listing(self) -> ResolvedEngine:
        ranks = {machine._reception._desk.identity: address for address, machine in self.producers.items()}
        return ResolvedEngine(
            BOOTSTRAP,
            PREFILL,
            {who.rank: address for who, address in ranks.items()},
            {who.rank: who.incarnation for who in ranks},
        )

    def deliver(self, effects: Sequence[Any]) -> None:
        """Carry out what the consumer says, and what follows from it."""
        for effect in effects:
            if isinstance(effect, Resolve):
                self.deliver(self.consumer.resolved(self.listing(), self.now))
            elif isinstance(effect, Send):
                self._to_producer(effect)
            else:
                self.effects.append(effect)

    def deliver_replies(self, address: str, effects: Sequence[Any]) -> None:
        """Carry out what a producer says, and what follows from it."""
        for effect in effects:
            if not isinstance(effect, Reply):
                self.told.append(effect)
            elif self._passes(effect.message):
                message = decode_from_producer(encode(effect.message))
                self.deliver(self.consumer.receive(address, message, self.now))

    def _to_producer(self, effect: Send) -> None:
        machine = self.producers.get(effect.address)
        if self._passes(effect.message) and machine is not None:
            message = decode_from_consumer(encode(effect.message))
            self.deliver_replies(effect.address, machine.receive(b"consumer", message, self.now))

    def _passes(self, message: Any) -> bool:
        name = type(message).__name__
        if name in self.lose:
            return False
        self.carried.append((name, len(encode(message))))
        return True

    def keep(self, item: Kept) -> None:
        for address, machine in list(self.producers.items()):
            self.deliver_replies(address, machine.keep(item, self.now))

    def start(self, request: PullRequest) -> None:
        self.deliver(self.consumer.start(request, self.now))

    def pass_time(self, seconds: float) -> None:
        """Let timers fire in order for so long."""
        end = self.now + seconds
        while (due := self._next_due()) is not None and due <= end:
            self.now = max(self.now, due)
            self.deliver(self.consumer.tick(self.now))
            for address, machine in list(self.producers.items()):
                self.deliver_replies(address, machine.tick(self.now))
        self.now = end

    def _next_due(self) -> float | None:
        machines = [self.consumer, *self.producers.values()]
        return min((due for machine in machines if (due := machine.next_deadline()) is not None), default=None)

    @property
    def reads(self) -> list[StartRead]:
        return only(self.effects, StartRead)

    @property
    def reports(self) -> list[Report]:
        return only(self.effects, Report)
