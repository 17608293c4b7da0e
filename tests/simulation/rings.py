"""Staging rings in the simulation: gathers into them, and reads from one into the other that end in a scatter.

A page is one byte long here, so that a slot of n bytes carries a chunk of n pages.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from mooncake_hetero_tp.core.effects import Gather, GatherOutcome, ReadOutcome, StartChunk
from mooncake_hetero_tp.core.messages import Offer
from mooncake_hetero_tp.types import TokenRange
from tests.simulation.world import Violation

if TYPE_CHECKING:
    from tests.simulation.consumers import ConsumerRank, Job
    from tests.simulation.producers import ProducerRank

PAGE_TOKENS = 4
TORN = -1
"""Content of a block, page or slot that nobody has written."""
RING_BASE = 1000
"""Where a producer's ring begins, in the addresses of Staged."""

Rings = tuple[Offer | None, Offer | None]
"""The prefill engine's and the decode engine's."""


def draw_rings(rng: random.Random) -> Rings:
    """Small ones, mostly smaller than what is loaded; in a part of the schedules one side has none."""
    if rng.random() < 0.4:
        return None, None
    ours, theirs = (Offer(rng.choice((1, 1, 2)), rng.randint(1, 4)) for _ in range(2))
    return (None if rng.random() < 0.1 else ours), (None if rng.random() < 0.1 else theirs)


def pages_of(tokens: TokenRange) -> range:
    return range(tokens.start // PAGE_TOKENS, -(-tokens.end // PAGE_TOKENS))


def chunk_pages(pages: range, chunk: int, chunk_bytes: int) -> range:
    return pages[chunk * chunk_bytes : (chunk + 1) * chunk_bytes]


class Gathering:
    """One Gather under way: the slot is torn at once and filled page by page, from what the blocks hold then."""

    def __init__(self, rank: ProducerRank, gather: Gather) -> None:
        self.rank = rank
        self.gather = gather
        self.world = rank.world
        self.pages = chunk_pages(pages_of(gather.ranges[0]), gather.chunk, gather.chunk_bytes)
        self._begin()

    def _begin(self) -> None:
        rank, gather, rng = self.rank, self.gather, self.world.rng
        rank.engine.cluster.check_no_slot_reader(rank, gather.slot)
        if gather.slot in rank.filling:
            raise Violation(f"{rank.name} fills slot {gather.slot} twice at a time")
        rank.filling.add(gather.slot)
        rank.ring[gather.slot] = [TORN] * len(self.pages)
        slow = self.world.weather.gather_slow
        span = 6 * rng.random() if slow and rng.random() < slow else 0.001 + 0.01 * rng.random()
        for place in range(len(self.pages)):
            self.world.later(span * rng.random(), self._copy, place)
        self.world.later(span, self._return)

    def _copy(self, place: int) -> None:
        if not self.rank.dead:
            block = int(self.gather.blocks[0][self.pages[place]])
            self.rank.ring[self.gather.slot][place] = self.rank.memory[block]

    def _return(self) -> None:
        rank, rng = self.rank, self.world.rng
        if rank.dead:
            return
        rank.filling.remove(self.gather.slot)
        fails = self.world.weather.gather_fail
        error = "no kernel" if fails and rng.random() < fails else None
        self.world.note(rank.name, "gathered chunk", self.gather.chunk, "in slot", self.gather.slot, error or "well")
        rank.call(rank.machine.gathered, self.gather.gather_id, GatherOutcome(len(self.pages), 7, error))


class ChunkRead:
    """One StartChunk under way: into the slot, and from there, if that was in time, into the pages."""

    def __init__(self, rank: ConsumerRank, job: Job, start: StartChunk) -> None:
        self.rank = rank
        self.job = job
        self.start = start
        self.world = rank.world
        self.source: ProducerRank | None = None
        self.source_slot = -1
        self.deadline = rank.true_time(start.deadline)
        self.counted = True
        """Its consumer would still take its bytes for good."""
        self.may_write_slot = True
        self.may_write = True
        """Into pages."""
        self._returned = False
        self.pages = chunk_pages(job.loaded_pages, start.chunk, start.chunk_bytes)
        if len(self.pages) != start.length_bytes:
            raise Violation(f"{rank.name}: chunk {start.chunk} has {start.length_bytes} pages, expected {self.pages}")
        self._begin()

    @property
    def lives(self) -> bool:
        """Whether its producer must leave the slot as it is."""
        return (
            self.counted
            and self.job.wanted
            and not self._returned
            and not self.rank.dead
            and self.world.now < self.deadline
        )

    def _begin(self) -> None:
        rank, slot = self.rank, self.start.slot
        for other in rank.chunk_reads:
            if other.start.slot == slot and other.may_write_slot:
                raise Violation(f"{rank.name} reads into slot {slot}, which another read may still write into")
        self.source = rank.engine.cluster.transports.get(self.start.transport_session)
        if self.source is not None and self.source.offer is not None:
            self.source_slot = (self.start.address - RING_BASE) // self.source.offer.slot_bytes
        rank.ring[slot] = [TORN] * len(self.pages)
        world, rng, weather = self.world, self.world.rng, self.world.weather
        span = 0.001 + 0.01 * rng.random()
        if weather.read_slow and rng.random() < weather.read_slow / 2:
            span = 9 * rng.random()
        cut = rng.randint(0, len(self.pages))
        world.later(span * rng.random(), self._copy, range(cut))
        rest = range(cut, len(self.pages))
        if weather.read_fail and rng.random() < weather.read_fail / 2:
            quiet = rng.random() < 0.5
            world.later(span, self._return, "transport failed", quiet)
            if not quiet:
                world.later(span + 4 * rng.random(), self._copy, rest)
        else:
            world.later(span, self._finish, rest)

    def _copy(self, places: range) -> None:
        source = self.source
        if not self.may_write_slot or self.rank.dead or source is None or source.dead:
            return
        held = source.ring.get(self.source_slot, [])
        for place in places:
            self.rank.ring[self.start.slot][place] = held[place] if place < len(held) else TORN

    def _finish(self, rest: range) -> None:
        self._copy(rest)
        if self.source is None or self.source.dead:
            self._return("connection reset", self.world.rng.random() < 0.5)
        else:
            self._return(None, quiet=True)

    def _return(self, error: str | None, quiet: bool) -> None:
        """The engine call comes back; a paused process notices when it goes on."""
        world, rank = self.world, self.rank
        if self._returned or rank.dead:
            return
        if world.now < rank.paused_until:
            world.at(rank.paused_until, self._return, error, quiet)
            return
        self._returned = True
        self.may_write_slot = not quiet
        returned_at = rank.clock()
        if error is None and (world.now >= self.deadline or not self.counted):
            error = "late or stopped"
        outcome = ReadOutcome(error is None, returned_at, error=error, transport_dead=quiet)
        scatter_s = 0.001 if error else world.rng.choice((0.003, 0.003, 0.5)) * world.rng.random()
        world.later(scatter_s, self._end, outcome)

    def _end(self, outcome: ReadOutcome) -> None:
        rank = self.rank
        if rank.dead:
            return
        if self.world.now < rank.paused_until:
            self.world.at(rank.paused_until, self._end, outcome)
            return
        if outcome.ok:
            self._scatter()
        self.may_write = False
        self.job.last_return = self.world.now
        self.world.note(rank.name, "chunk", self.start.chunk, "of", self.job.request_id, outcome.error or "scattered")
        rank.call(rank.machine.read_finished, self.start.read_id, outcome)

    def _scatter(self) -> None:
        rank, job = self.rank, self.job
        held = rank.ring[self.start.slot]
        if self.counted and job.wanted and held != [job.prefill.content(page) for page in self.pages]:
            raise Violation(f"{rank.name} scatters {held} as chunk {self.start.chunk} of {job.request_id}")
        for page, content in zip(self.pages, held, strict=True):
            rank.write_page(job, page, self.source, content)
        rank.engine.cluster.scattered += 1

    def stop(self) -> None:
        """The machine does not count it any more; the engine may or may not come back early."""
        self.counted = False
        if self.world.rng.random() < 0.5 and not self._returned:
            self.world.later(0.05 * self.world.rng.random(), self._return, "stopped", True)

    def fence(self) -> None:
        self.world.later(2 * self.world.rng.random(), self._fenced)

    def _fenced(self) -> None:
        if not self.rank.dead:
            self.may_write_slot = False
            self.rank.call(self.rank.machine.read_fenced, self.start.read_id)
