"""The prefill side: a scheduler with a block pool, and three ranks, of which nobody may read the third."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mooncake_hetero_tp.core.effects import (
    FinishedSending,
    Gather,
    Kept,
    Notice,
    ProducerEffect,
    Reply,
    ResolvedEngine,
    ResolveFailed,
)
from mooncake_hetero_tp.core.messages import Cancel, Grant, Offer, Staged
from mooncake_hetero_tp.core.producer import ProducerConfig, ProducerMachine
from mooncake_hetero_tp.core.regions import Group, RankTable
from mooncake_hetero_tp.core.shelf import Ring
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Mismatch, Rank, RequestId, Severity, TransferId
from tests.simulation.rings import PAGE_TOKENS, RING_BASE, TORN, Gathering
from tests.simulation.world import Process, Violation, World

RANKS = 3
BLOCKS = 7
ENGINE = EngineId("prefill")
BOOTSTRAP = "bootstrap:8998"
CONFIG = ProducerConfig(keep_s=30.0, lease_s=5.0, orphan_s=8.0)
TIGHT = replace(CONFIG, max_sessions=2, max_pulls=2, max_waiting=1, max_tombstones=1)
MISFIT = Mismatch("dtype", "bfloat16", "float32", Severity.REFUSE, "values mean something else", "set one --dtype")

PRODUCER_TABLE = RankTable(
    tp_size=RANKS,
    pp_size=1,
    layout="LBHNC",
    model={},
    groups=(Group(0, "attention", PAGE_TOKENS, PAGE_TOKENS),),
    regions=(),
    buffers=(),
)


@dataclass(slots=True, eq=False)
class Prefill:
    """One request of the prefill engine."""

    uid: int
    transfer_id: TransferId
    tokens: int
    aborts: bool
    prompt: int
    """Stands for its prompt; a retry has the same."""
    blocks: list[int] = field(default_factory=list)
    finished: bool = False
    done_at: set[int] = field(default_factory=set)
    freed: bool = False

    @property
    def request_id(self) -> RequestId:
        return RequestId(f"p{self.uid}")

    @property
    def pages(self) -> int:
        return -(-self.tokens // PAGE_TOKENS)

    def content(self, page: int) -> int:
        """What a correctly computed page of it holds, on every rank."""
        return self.prompt * 100 + page


class ProducerRank(Process):
    """One worker process of the prefill engine, and its memory: block id -> content."""

    def __init__(self, engine: ProducerEngine, index: int) -> None:
        world = engine.world
        super().__init__(world, f"P{index}.{engine.incarnation}")
        self.engine = engine
        self.index = index
        self.memory = [TORN] * (BLOCKS + 1)
        self.offer: Offer | None = engine.offer
        self.ring: dict[int, list[int]] = {}
        self.filling: set[int] = set()
        self.leases: dict[tuple[int, int], float] = {}
        """(session, pull) -> end of what was granted, by this process's clock."""
        self.address = f"p{index}" if engine.same_ports else f"p{index}.{engine.incarnation}"
        self.transport = f"t{index}.{engine.incarnation}"
        self.identity = Identity(ENGINE, Incarnation(f"{engine.incarnation:016x}"), Rank(tp=index))
        self.machine = ProducerMachine(
            self.identity,
            PRODUCER_TABLE,
            self.transport,
            TIGHT if engine.tight else CONFIG,
            draw=lambda: world.rng.getrandbits(63),
            compare=lambda _mine, _theirs: (MISFIT,) if engine.misfit and index == 1 else (),
            validate=lambda _table: None,
            ring=Ring(self.offer, self._address_of) if self.offer else None,
        )

    def _address_of(self, slot: int) -> int:
        return RING_BASE + slot * (self.offer.slot_bytes if self.offer else 0)

    def receive(self, peer: bytes, message: Any) -> None:
        self.world.note(self.name, "<-", message)
        self.call(self._take_in, peer, message)

    def _take_in(self, peer: bytes, message: Any, now: float) -> list[ProducerEffect]:
        if isinstance(message, Cancel):
            self.leases.pop((message.session, message.pull), None)
        effects: list[ProducerEffect] = self.machine.receive(peer, message, now)
        return effects

    def perform(self, effect: Any) -> None:
        match effect:
            case Reply():
                self.world.note(self.name, "->", effect.message)
                self._check_answer(effect.message)
                self.world.transmit(
                    "answer", effect.message, self.engine.cluster.to_consumer, effect.peer, self.address
                )
            case Gather():
                Gathering(self, effect)
            case FinishedSending():
                self.engine.finished_sending(self, effect.request_id)
            case Notice():
                self.world.note(self.name, effect.text)

    def _check_answer(self, message: Any) -> None:
        if isinstance(message, Grant):
            self.leases[message.session, message.pull] = self.clock() + message.lease_s * (1 + CONFIG.clock_drift)
        elif isinstance(message, Staged) and self.clock() >= self.leases.get((message.session, message.pull), 0.0):
            raise Violation(f"{self.name} says {message}, but the lease is over")

    def write(self, prefill: Prefill) -> None:
        """The GPU finishes the last step of a prefill here."""
        for page, block in enumerate(prefill.blocks):
            self.memory[block] = prefill.content(page)


class ProducerEngine:
    """One life of the prefill engine: scheduler, block pool, ranks."""

    def __init__(self, cluster: Any, incarnation: int, *, same_ports: bool) -> None:
        self.cluster = cluster
        self.world: World = cluster.world
        self.incarnation = incarnation
        self.same_ports = same_ports
        self.misfit = self.world.rng.random() < self.world.weather.misfit
        self.tight = self.world.rng.random() < self.world.weather.tight
        self.offer: Offer | None = cluster.rings[0]
        self.free = list(range(1, BLOCKS + 1))
        self.queue: list[Prefill] = []
        self.live: dict[RequestId, Prefill] = {}
        self.ranks = [ProducerRank(self, index) for index in range(RANKS)]

    @property
    def dead(self) -> bool:
        return self.ranks[0].dead

    def listing(self, *, with_incarnations: bool) -> ResolvedEngine | ResolveFailed:
        """What the bootstrap server says of this life."""
        if self.dead:
            return ResolveFailed(BOOTSTRAP, ENGINE, "connection refused")
        addresses = {rank.identity.rank: rank.address for rank in self.ranks}
        named = {rank.identity.rank: rank.identity.incarnation for rank in self.ranks}
        return ResolvedEngine(BOOTSTRAP, ENGINE, addresses, dict(named) if with_incarnations else {})

    def submit(self, prefill: Prefill) -> None:
        if self.dead:
            return
        self.queue.append(prefill)
        self._schedule()

    def _schedule(self) -> None:
        while self.queue and len(self.free) >= self.queue[0].pages:
            prefill = self.queue.pop(0)
            prefill.blocks = [self.free.pop() for _ in range(prefill.pages)]
            self.live[prefill.request_id] = prefill
            for rank in self.ranks:
                for block in prefill.blocks:
                    rank.memory[block] = TORN
            self.world.later(0.3 * self.world.rng.random(), self._end_step, prefill)

    def _end_step(self, prefill: Prefill) -> None:
        if self.dead:
            return
        rng = self.world.rng
        if prefill.aborts:
            self.world.note("prefill", prefill.request_id, "aborted")
            self._free(prefill)
            for rank in self.ranks:
                rank.order(rank.machine.abort, prefill.transfer_id, prefill.request_id)
            return
        self.world.note("prefill", prefill.request_id, prefill.transfer_id, "finished in blocks", prefill.blocks)
        prefill.finished = True
        blocks = (np.array(prefill.blocks, np.int32),)
        for rank in self.ranks:
            written = rng.random() < 0.5
            if written:
                rank.write(prefill)
            kept = Kept(prefill.request_id, prefill.transfer_id, blocks, prefill.tokens, written)
            rank.order(rank.machine.keep, kept)
            if not written:
                self.world.later(0.005 + 0.02 * rng.random(), self._gpu_done, rank, prefill)
        if rng.random() < self.world.weather.abort_producer / 2:
            self.world.later(rng.random(), self._abort_kept, prefill)

    def _abort_kept(self, prefill: Prefill) -> None:
        """An abort that comes after the hand-over was promised."""
        for rank in self.ranks:
            rank.order(rank.machine.abort, prefill.transfer_id, prefill.request_id)

    def _gpu_done(self, rank: ProducerRank, prefill: Prefill) -> None:
        if not prefill.freed and rank.index not in prefill.done_at:
            rank.write(prefill)
        rank.order(rank.machine.mark_ready, prefill.transfer_id, prefill.request_id)

    def finished_sending(self, rank: ProducerRank, request_id: RequestId) -> None:
        self.world.note(rank.name, "finished sending", request_id)
        prefill = self.live.get(request_id)
        if prefill is None or not prefill.finished or rank.index in prefill.done_at:
            raise Violation(f"{rank.name} finished sending {request_id}, which it was not told to keep (any more)")
        self.cluster.check_no_reader(rank, prefill)
        prefill.done_at.add(rank.index)
        for block in prefill.blocks:  # nothing may rely on this rank's part from here on
            rank.memory[block] = TORN
        if len(prefill.done_at) == RANKS:
            self._free(prefill)

    def _free(self, prefill: Prefill) -> None:
        if prefill.freed or any(block in self.free for block in prefill.blocks):
            raise Violation(f"blocks of {prefill.request_id} freed twice")
        prefill.freed = True
        del self.live[prefill.request_id]
        self.free += prefill.blocks
        for rank in self.ranks:
            for block in prefill.blocks:
                rank.memory[block] = TORN
        self.world.rng.shuffle(self.free)
        self._schedule()

    def close(self) -> None:
        self.world.note("prefill engine shuts down")
        for rank in self.ranks:
            rank.order(rank.machine.close)

    def kill(self) -> None:
        self.world.note("prefill engine killed")
        for rank in self.ranks:
            rank.dead = True
            rank.memory = [TORN] * (BLOCKS + 1)
            rank.ring = {}
