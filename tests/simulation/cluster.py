"""One schedule: a prefill engine, one or two decode engines, their jobs and their misfortunes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from mooncake_hetero_tp.core.consumer import ConsumerMachine
from mooncake_hetero_tp.core.effects import ResolvedEngine, ResolveFailed
from mooncake_hetero_tp.core.producer import ProducerMachine
from mooncake_hetero_tp.core.releaser import ReleaserMachine
from mooncake_hetero_tp.core.slots import SlotTable
from mooncake_hetero_tp.types import TransferId
from tests.simulation.consumers import PAGES, SOURCES, ConsumerEngine, Endpoint, Job
from tests.simulation.producers import BLOCKS, Prefill, ProducerEngine, ProducerRank
from tests.simulation.rings import PAGE_TOKENS, Rings, draw_rings
from tests.simulation.world import CALM, Process, Violation, Weather, World, draw_weather


class Cluster:
    """Everything of one schedule. `run` raises Violation where an invariant does not hold."""

    def __init__(
        self, seed: int, weather: Weather | None = None, *, drop_nth: int | None = None, rings: Rings | None = None
    ) -> None:
        rng = random.Random(seed)
        self.world = World(seed, draw_weather(rng) if weather is None else weather, drop_nth=drop_nth)
        self.ready = 0
        self.scattered = 0
        """Chunks that came into pages."""
        self.jobs: list[Job] = []
        self.transports: dict[str, ProducerRank] = {}
        self._incarnation = 0
        self._uid = 0
        self._listing: ResolvedEngine | ResolveFailed | None = None
        self._same_ports = self.world.rng.random() < 0.5
        self.sources = self.world.rng.choice(SOURCES)
        self.rings = rings or draw_rings(self.world.rng)
        self.addresses: dict[str, ProducerRank] = {}
        self.peers: dict[bytes, Endpoint] = {}
        self.producer = self._new_producer()
        self.consumers = [self._new_consumer("D")]
        if self.world.rng.random() < 0.15:
            self.consumers.append(self._new_consumer("E"))
        self._plan_jobs()
        self._plan_troubles()

    # --- processes -------------------------------------------------------------------------------

    def _next_incarnation(self) -> int:
        self._incarnation += 1
        return self._incarnation

    def _new_producer(self) -> ProducerEngine:
        engine = ProducerEngine(self, self._next_incarnation(), same_ports=self._same_ports)
        for rank in engine.ranks:
            self.addresses[rank.address] = self.transports[rank.transport] = rank
        return engine

    def _new_consumer(self, name: str) -> ConsumerEngine:
        engine = ConsumerEngine(self, name, self._next_incarnation())
        self.peers |= {process.peer: process for process in engine.processes}
        return engine

    # --- network ---------------------------------------------------------------------------------

    def to_producer(self, address: str, peer: bytes, message: Any) -> None:
        """What a killed process had sent dies with its connection."""
        rank = self.addresses.get(address)
        if rank is not None and not rank.dead and not self.peers[peer].dead:
            rank.receive(peer, message)

    def to_consumer(self, peer: bytes, address: str, message: Any) -> None:
        process = self.peers[peer]
        if not process.dead:
            process.receive(address, message)

    def answer_resolve(self, process: Endpoint) -> None:
        rng, stale = self.world.rng, self._listing
        if stale is not None and rng.random() < self.world.weather.stale_listing:
            answer = stale
        else:
            answer = self.producer.listing(with_incarnations=rng.random() < 0.7)
        process.call(process.machine.resolved, answer)

    # --- jobs ------------------------------------------------------------------------------------

    def _next_uid(self) -> int:
        self._uid += 1
        return self._uid

    def _plan_jobs(self) -> None:
        for _ in range(self.world.rng.randint(1, 4)):
            self._plan_job(self._next_uid(), 3 * self.world.rng.random(), None)

    def _plan_job(self, prompt: int, when: float, first: Prefill | None) -> None:
        """One hand-over: both sides at once, or one after the other; sometimes it is never heard of."""
        rng, weather, world = self.world.rng, self.world.weather, self.world
        tokens = first.tokens if first else rng.randint(1, 3 * PAGE_TOKENS)
        aborts = rng.random() < weather.abort_producer
        prefill = Prefill(self._next_uid(), TransferId(f"xfer-{prompt}"), tokens, aborts, prompt)
        if rng.random() < 0.95:
            world.at(when, self._submit_prefill, prefill)
        for engine in range(len(self.consumers)):
            if engine == 0 or rng.random() < 0.5:
                world.at(when + rng.choice((0, 0.1, 0.6, 2.5)) * rng.random(), self._submit, engine, prefill)
        if aborts and first is None and rng.random() < 0.5:  # the router tries again with the same id
            self._plan_job(prompt, when + 5 * rng.random(), prefill)

    def _submit_prefill(self, prefill: Prefill) -> None:
        self.producer.submit(prefill)

    def _submit(self, engine: int, prefill: Prefill) -> None:
        consumer = self.consumers[engine]
        siblings = 2 if self.world.rng.random() < 0.15 else 1
        jobs = [self._job(prefill) for _ in range(siblings)]
        if not consumer.dead:
            self.jobs += jobs
        consumer.submit(jobs)

    def _job(self, prefill: Prefill) -> Job:
        rng = self.world.rng
        skip = rng.randint(0, prefill.tokens) if rng.random() < 0.3 else 0
        aborts = rng.random() < self.world.weather.abort_consumer
        return Job(self._next_uid(), prefill, skip, rng.choice((0.01, 0.3, 6)) * rng.random() if aborts else None)

    # --- troubles --------------------------------------------------------------------------------

    def _plan_troubles(self) -> None:
        rng, weather = self.world.rng, self.world.weather
        for _ in range(weather.pauses):
            self.world.at(4 * rng.random(), self._pause)
        for _ in range(weather.producer_restarts):
            self.world.at(4 * rng.random(), self._restart_producer)
        for _ in range(weather.consumer_restarts):
            self.world.at(4 * rng.random(), self._restart_consumer)
        for _ in range(weather.partitions):
            self.world.at(4 * rng.random(), self._partition)

    def _pause(self) -> None:
        """SIGSTOP one process or a whole side."""
        rng = self.world.rng
        side: list[Process] = [*rng.choice((self.producer.ranks, self.consumers[0].processes))]
        until = self.world.now + 12 * rng.random()
        for process in side if rng.random() < 0.5 else [rng.choice(side)]:
            self.world.note(process.name, f"paused until {until:.3f}")
            process.paused_until = until

    def _partition(self) -> None:
        rng, world = self.world.rng, self.world
        for way in rng.choice((("request",), ("answer",), ("request", "answer"))):
            world.dark_until[way] = world.now + 9 * rng.random()
            world.note(f"every {way} is lost until {world.dark_until[way]:.3f}")

    def _restart_producer(self) -> None:
        """Killed, or shut down in order first; it may never come back."""
        rng = self.world.rng
        self._listing = self.producer.listing(with_incarnations=True)
        if rng.random() < 0.3:
            self.producer.close()
            self.world.later(2 * rng.random(), self._kill_producer)
        else:
            self._kill_producer()

    def _kill_producer(self) -> None:
        self.producer.kill()
        if self.world.rng.random() < 0.8:
            self.world.later(self.world.rng.choice((0.2, 3)) * self.world.rng.random(), self._revive_producer)

    def _revive_producer(self) -> None:
        self.world.note("prefill engine restarted")
        self._same_ports = self.world.rng.random() < 0.5
        self.producer = self._new_producer()

    def _restart_consumer(self) -> None:
        if self.world.rng.random() < 0.3:
            self.consumers[0].close()
            self.world.later(2 * self.world.rng.random(), self._revive_consumer)
        else:
            self._revive_consumer()

    def _revive_consumer(self) -> None:
        self.consumers[0].kill()
        self.world.note("decode engine restarted")
        self.consumers[0] = self._new_consumer("D")

    # --- invariants ------------------------------------------------------------------------------

    def check_no_reader(self, rank: ProducerRank, prefill: Prefill) -> None:
        """Blocks are not given back under a granted, unexpired reader that still counts."""
        for consumer in self.consumers:
            for reader in consumer.ranks:
                for read in reader.reads.values():
                    if read.start.producer == rank.identity and read.job.prefill is prefill and read.lives:
                        raise Violation(f"{rank.name} frees {prefill.request_id} under a read of {reader.name}")

    def check_no_slot_reader(self, rank: ProducerRank, slot: int) -> None:
        """A slot is not filled again under a read that still counts."""
        for consumer in self.consumers:
            for reader in consumer.ranks:
                for read in reader.chunk_reads:
                    if read.source is rank and read.source_slot == slot and read.lives:
                        raise Violation(f"{rank.name} fills slot {slot} under a read of {reader.name}")

    def run(self) -> Cluster:
        self.world.run()
        self._check_rest()
        return self

    def _check_rest(self) -> None:
        for job in self.jobs:
            if not job.ended and not self._died(job):
                raise Violation(f"{job.request_id} never ended")
        for consumer in self.consumers:
            if sorted(consumer.free) != list(range(1, PAGES + 1)):
                raise Violation(f"{consumer.name}: pages missing, free are {sorted(consumer.free)}")
            _check_empty([process for process in consumer.processes if not process.dead])
        if not self.producer.dead:
            if sorted(self.producer.free) != list(range(1, BLOCKS + 1)):
                raise Violation(f"producer blocks missing, free are {sorted(self.producer.free)}")
            _check_empty(self.producer.ranks)
        if self.world.weather is CALM and len(self.consumers) == 1:
            self._check_calm()

    def _died(self, job: Job) -> bool:
        return not any(job in consumer.jobs.values() or job in consumer.queue for consumer in self.consumers)

    def _check_calm(self) -> None:
        """Without any trouble every load of a prefill that came is ready, or was caught in a circle.

        Decode requests whose pages are allocated can wait for a prefill that waits for blocks, which are kept
        for decode requests that wait for pages. Only a deadline resolves that, and what started after it may
        find its blocks expired.
        """
        failed = [job.request_id for job in self.jobs if not job.ready and job.loads_soon and not job.timed_out]
        if failed:
            raise Violation(f"nothing went wrong, but {failed} failed")


_TABLES: dict[type, tuple[str, ...]] = {
    ProducerMachine: ("_kept", "_pulls", "_tombs", "_timers", "_shelf"),
    ConsumerMachine: ("_requests", "_pulls", "_reader", "_timers"),
    ReleaserMachine: ("_pending", "_numbers", "_timers"),
}


def _check_empty(processes: Iterable[Process]) -> None:
    for process in processes:
        machine = process.machine
        left = {name: len(getattr(machine, name)) for name in _TABLES[type(machine)] if len(getattr(machine, name))}
        if left or not machine.drained:
            raise Violation(f"{process.name}: tables are not empty: {left}")
        ring = _slots_of(machine)
        if ring is not None and not ring.all_home:
            raise Violation(f"{process.name}: slots are missing: {vars(ring)}")


def _slots_of(machine: Any) -> SlotTable[Any] | None:
    match machine:
        case ProducerMachine():
            return machine._shelf._slots
        case ConsumerMachine():
            return machine._reader.stagings._slots
        case _:
            return None


def run_seed(seed: int, **options: Any) -> Cluster:
    """Run one schedule; a violation carries the seed and the whole story."""
    cluster = Cluster(seed, **options)
    try:
        return cluster.run()
    except Exception as error:
        story = cluster.world.story()
        raise Violation(f"seed {seed}: {type(error).__name__}: {error}\n{cluster.world.weather}\n{story}") from error
