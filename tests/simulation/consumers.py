"""The decode side: a scheduler with a page pool and its releaser, and ranks whose reads really move content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mooncake_hetero_tp.core.consumer import ConsumerConfig, ConsumerMachine
from mooncake_hetero_tp.core.effects import (
    ConsumerEffect,
    ExtendRead,
    FenceRead,
    Notice,
    PullRequest,
    Report,
    Resolve,
    Send,
    StartChunk,
    StartRead,
    StopRead,
)
from mooncake_hetero_tp.core.regions import Group, RankTable
from mooncake_hetero_tp.core.releaser import ReleaserConfig, ReleaserMachine
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Rank, RequestId, TokenRange, TransferId
from tests.simulation.producers import BOOTSTRAP, ENGINE, Prefill, ProducerRank
from tests.simulation.reads import Read
from tests.simulation.rings import PAGE_TOKENS, TORN, ChunkRead
from tests.simulation.world import Process, Violation, World

PAGES = 8
RANKS = 2
CONFIG = ConsumerConfig(
    deadline_s=20.0,
    connect_timeout_s=6.0,
    resend_s=0.2,
    resend_max_s=1.6,
    heartbeat_s=2.0,
    silence_s=3.0,
    refuse_cache_s=3.0,
)
RELEASER_CONFIG = ReleaserConfig(deadline_s=30.0, resend_s=0.2, resend_max_s=3.2, refresh_s=4.0, cache_s=10.0)

CONSUMER_TABLE = RankTable(
    tp_size=2,
    pp_size=1,
    layout="LBHNC",
    model={},
    groups=(Group(0, "attention", PAGE_TOKENS, PAGE_TOKENS),),
    regions=(),
    buffers=(),
)
Sources = tuple[tuple[int, ...], ...]
"""Producer ranks that each consumer rank reads from."""
SOURCES: tuple[Sources, ...] = (((0, 1), (1,)), ((0, 1), (1,)), ((0,), (1,)), ((0, 1), (1, 2)))
"""In most schedules nobody reads from the third producer rank."""


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """Stands in for a PairPlan: all pages, from one producer rank."""

    source: int

    def producer_ranges(self, ranges: tuple[TokenRange, ...]) -> tuple[TokenRange, ...]:
        return ranges


@dataclass(slots=True, eq=False)
class Job:
    """One request of the decode engine."""

    uid: int
    prefill: Prefill
    skip: int
    """Tokens it already has (a prefix hit); all of them: a full local hit."""
    abort_after: float | None
    pages: list[int] = field(default_factory=list)
    started_at: dict[int, float] = field(default_factory=dict)
    reports: dict[int, bool] = field(default_factory=dict)
    wanted: bool = True
    """Its client still waits for it."""
    ended: bool = False
    ready: bool = False
    timed_out: bool = False
    last_return: float = 0.0
    """When the last of its reads returned or was fenced."""

    @property
    def request_id(self) -> RequestId:
        return RequestId(f"d{self.uid}")

    @property
    def transfer_id(self) -> TransferId:
        return self.prefill.transfer_id

    @property
    def loads_soon(self) -> bool:
        """Whether its ranks began to load it before any deadline had to resolve anything."""
        return bool(self.started_at) and max(self.started_at.values()) < CONFIG.deadline_s and self.prefill.finished

    @property
    def loaded_pages(self) -> range:
        """Pages that the load writes; none on a full hit."""
        return range(self.skip // PAGE_TOKENS, self.prefill.pages if self.skip < self.prefill.tokens else 0)


class Endpoint(Process):
    """What a rank and the scheduler's releaser have in common: they send, and ask the bootstrap."""

    def __init__(self, engine: ConsumerEngine, name: str) -> None:
        super().__init__(engine.world, name)
        self.engine = engine
        self.peer = name.encode()

    def receive(self, address: str, message: Any) -> None:
        self.world.note(self.name, "<-", message)
        self.call(self.machine.receive, address, message)

    def perform(self, effect: Any) -> None:
        match effect:
            case Send():
                self.world.note(self.name, "->", effect.message)
                self.world.transmit(
                    "request", effect.message, self.engine.cluster.to_producer, effect.address, self.peer
                )
            case Resolve():
                delay = 0.002 + 0.01 * self.world.rng.random()
                self.world.later(delay, self.engine.cluster.answer_resolve, self)
            case Notice():
                self.world.note(self.name, effect.text)


class ConsumerRank(Endpoint):
    """One worker process of the decode engine, and its memory: (page, producer rank) -> content."""

    def __init__(self, engine: ConsumerEngine, index: int) -> None:
        super().__init__(engine, f"{engine.name}{index}.{engine.incarnation}")
        self.index = index
        self.sources: tuple[int, ...] = engine.cluster.sources[index]
        self.memory: dict[tuple[int, int], int] = {}
        self.reads: dict[int, Read | ChunkRead] = {}
        self.ring: dict[int, list[int]] = {}
        self.machine = ConsumerMachine(
            Identity(engine.engine_id, Incarnation(f"{engine.incarnation:016x}"), Rank(tp=index)),
            CONSUMER_TABLE,
            replace(CONFIG, staging=engine.cluster.rings[1], staging_window=1 + self.world.rng.randrange(4)),
            draw=lambda: self.world.rng.getrandbits(63),
            planner=self._plan,
            validate=lambda _table: None,
            cuts=lambda _plan: (),
        )

    @property
    def chunk_reads(self) -> list[ChunkRead]:
        return [read for read in self.reads.values() if isinstance(read, ChunkRead)]

    def write_page(self, job: Job, page: int, source: ProducerRank | None, content: int) -> None:
        """What a producer rank had of one page, in the place where it belongs."""
        target = job.pages[page]
        owner = self.engine.owner.get(target)
        if owner != job.uid:
            raise Violation(
                f"a read of {job.request_id} wrote page {target}, which belongs to {owner or 'nobody'} by now"
            )
        if source is not None:
            self.memory[target, source.index] = content

    def _plan(self, _own: RankTable, _tables: Mapping[Rank, RankTable]) -> dict[Rank, SourcePlan]:
        return {Rank(tp=source): SourcePlan(source) for source in self.sources}

    def start(self, job: Job, request: PullRequest, now: float) -> list[ConsumerEffect]:
        job.started_at[self.index] = self.world.now
        effects: list[ConsumerEffect] = self.machine.start(request, now)
        return effects

    def perform(self, effect: Any) -> None:
        match effect:
            case StartRead():
                self.world.note(self.name, "reads", effect.request_id, "from", effect.transport_session)
                self.reads[effect.read_id] = Read(self, self.engine.jobs[effect.request_id], effect)
            case StartChunk():
                self.world.note(self.name, "reads chunk", effect.chunk, "of", effect.request_id, "into", effect.slot)
                self.reads[effect.read_id] = ChunkRead(self, self.engine.jobs[effect.request_id], effect)
            case ExtendRead():
                self.reads[effect.read_id].deadline = self.true_time(effect.deadline)
            case StopRead():
                self.reads[effect.read_id].stop()
            case FenceRead():
                self.reads[effect.read_id].fence()
            case Report():
                self.world.note(self.name, "reports", effect.request_id, effect.ok, effect.reason)
                self.engine.report(self, effect)
            case _:
                super().perform(effect)


class Releaser(Endpoint):
    """The scheduler-side process of the decode engine."""

    def __init__(self, engine: ConsumerEngine) -> None:
        super().__init__(engine, f"{engine.name}S.{engine.incarnation}")
        self.machine = ReleaserMachine(engine.engine_id, RELEASER_CONFIG, draw=lambda: self.world.rng.getrandbits(63))


class ConsumerEngine:
    """One life of a decode engine: scheduler, page pool, releaser, ranks."""

    def __init__(self, cluster: Any, name: str, incarnation: int) -> None:
        self.cluster = cluster
        self.world: World = cluster.world
        self.name = name
        self.engine_id = EngineId(f"decode-{name}")
        self.incarnation = incarnation
        self.free = list(range(1, PAGES + 1))
        self.owner: dict[int, int] = {}
        self.queue: list[Job] = []
        self.jobs: dict[RequestId, Job] = {}
        self.siblings: dict[TransferId, int] = {}
        self.released: set[TransferId] = set()
        self.releaser = Releaser(self)
        self.ranks = [ConsumerRank(self, index) for index in range(RANKS)]

    @property
    def dead(self) -> bool:
        return self.releaser.dead

    @property
    def processes(self) -> list[Endpoint]:
        return [self.releaser, *self.ranks]

    def submit(self, jobs: list[Job]) -> None:
        """Requests that share one transfer id (n > 1) come together."""
        if self.dead:
            return
        if jobs[0].transfer_id in self.released:  # a remote load is single-use: these compute their prompts here
            for job in jobs:
                job.ended = True
            return
        for job in jobs:
            self.siblings[job.transfer_id] = self.siblings.get(job.transfer_id, 0) + 1
            self.jobs[job.request_id] = job
            self.queue.append(job)
            if job.abort_after is not None:
                self.world.later(job.abort_after, self.abort, job)
        self._schedule()

    def _schedule(self) -> None:
        while self.queue and len(self.free) >= self.queue[0].prefill.pages:
            job = self.queue.pop(0)
            job.pages = [self.free.pop() for _ in range(job.prefill.pages)]
            for page in job.pages:
                self.owner[page] = job.uid
            if job.skip >= job.prefill.tokens:
                self._settle(job)
                continue
            self._start(job)

    def _start(self, job: Job) -> None:
        tokens = TokenRange(job.skip, job.prefill.tokens)
        blocks = np.array(job.pages, np.int32)
        for rank in self.ranks:
            for page in job.pages:
                for source in rank.sources:
                    rank.memory[page, source] = TORN
            request = PullRequest(job.request_id, job.transfer_id, ENGINE, BOOTSTRAP, (tokens,), (blocks,))
            rank.order(rank.start, job, request)

    def abort(self, job: Job) -> None:
        """The client went away. The workers may hear of it late, or never (no further step)."""
        if self.dead or job.ended or not job.wanted:
            return
        self.world.note("client of", job.request_id, "went away")
        job.wanted = False
        self._release(job)
        if job in self.queue:
            self.queue.remove(job)
            self._end(job)
        elif self.world.rng.random() < 0.8:
            for rank in self.ranks:
                rank.order(rank.machine.cancel, job.request_id)

    def report(self, rank: ConsumerRank, report: Report) -> None:
        job = self.jobs.get(report.request_id)
        if job is None or rank.index in job.reports:
            raise Violation(f"{rank.name} reported {report.request_id}, which it was not loading (any more)")
        self._check_report(rank, job)
        job.reports[rank.index] = report.ok
        job.timed_out |= "not loaded within" in (report.reason or "")
        if len(job.reports) == len(self.ranks):
            self._settle(job)

    def _check_report(self, rank: ConsumerRank, job: Job) -> None:
        if any(read.may_write and read.job is job for read in rank.reads.values()):
            raise Violation(f"{rank.name} reported {job.request_id} while a read of it may write")
        started_at = job.started_at[rank.index]
        latest = max(started_at + 1.01 * CONFIG.deadline_s + 0.1, job.last_return + 0.1, rank.paused_until + 0.1)
        if self.world.now > latest:
            raise Violation(f"{rank.name} reported {job.request_id} only at {self.world.now:.2f} s, after {latest:.2f}")

    def _settle(self, job: Job) -> None:
        """All ranks are done with it."""
        job.ready = job.wanted and all(job.reports.values())
        if job.ready:
            self._check_content(job)
            self.cluster.ready += 1
        if job.wanted:
            self._release(job)
        self._end(job)

    def _check_content(self, job: Job) -> None:
        for rank in self.ranks:
            for page in job.loaded_pages:
                for source in rank.sources:
                    found, expected = rank.memory[job.pages[page], source], job.prefill.content(page)
                    if found != expected:
                        raise Violation(
                            f"{job.request_id} is ready, but page {page} of producer rank {source} on {rank.name} "
                            f"holds {found}, expected {expected}"
                        )

    def _release(self, job: Job) -> None:
        self.siblings[job.transfer_id] -= 1
        if not self.siblings[job.transfer_id]:
            self.world.note("scheduler releases", job.transfer_id)
            self.released.add(job.transfer_id)
            self.releaser.order(self.releaser.machine.release, job.transfer_id, ENGINE, BOOTSTRAP)

    def _end(self, job: Job) -> None:
        if job.ended:
            raise Violation(f"{job.request_id} ended twice")
        job.ended = True
        job.wanted = False
        del self.jobs[job.request_id]
        for page in job.pages:
            del self.owner[page]
        self.free += job.pages
        self.world.rng.shuffle(self.free)
        self._schedule()

    def close(self) -> None:
        self.world.note(f"decode engine {self.name} shuts down")
        for process in self.processes:
            process.order(process.machine.close)

    def kill(self) -> None:
        self.world.note(f"decode engine {self.name} killed")
        for process in self.processes:
            process.dead = True
        for job in self.jobs.values():
            job.wanted = False
