"""The fake transfer engine: a read copies page after page at moments of its own, late ones included."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_hetero_tp.core.effects import ReadOutcome, StartRead

if TYPE_CHECKING:
    from tests.simulation.consumers import ConsumerRank, Job
    from tests.simulation.producers import ProducerRank


class Read:
    """One StartRead under way. It may be slow, fail, go on writing after it failed, or never see its producer."""

    def __init__(self, rank: ConsumerRank, job: Job, start: StartRead) -> None:
        self.rank = rank
        self.job = job
        self.start = start
        self.world = rank.world
        self.source: ProducerRank | None = None
        """The process it is connected to, from its first copy on."""
        self.deadline = rank.true_time(start.deadline)
        self.counted = True
        """Its consumer would still take its bytes for good."""
        self.may_write = True
        self._returned = False
        self._begin()

    @property
    def lives(self) -> bool:
        """Whether its producer must not free the blocks under it."""
        return (
            self.counted
            and self.job.wanted
            and not self._returned
            and not self.rank.dead
            and self.world.now < self.deadline
        )

    def _begin(self) -> None:
        """Wait for a worker; ask to be staged, or connect and copy some pages, then the others."""
        world, rng, weather = self.world, self.world.rng, self.world.weather
        span = 0.002 + 0.02 * rng.random()
        if weather.read_slow and rng.random() < weather.read_slow:
            span = 9 * rng.random()
        if self.start.staging is not None and rng.random() < 0.8:
            self.may_write = False
            world.later(0.3 * span, self._ask_for_chunks, self.start.staging.slot_bytes)
            return
        fails = bool(weather.read_fail) and rng.random() < weather.read_fail
        pages = list(self.job.loaded_pages)
        cut = rng.randint(0, len(pages))
        world.later(span * rng.random(), self._copy, pages[:cut])
        if fails:
            self._fail_in(span, pages[cut:])
        else:
            world.later(span, self._finish, pages[cut:])

    def _ask_for_chunks(self, chunk_bytes: int) -> None:
        self._return(None, quiet=True, chunks=-(-len(self.job.loaded_pages) // chunk_bytes))

    def _fail_in(self, span: float, rest: list[int]) -> None:
        """Fail; where the session is not known dead, the rest of the pages comes after that, if at all."""
        rng = self.world.rng
        quiet = rng.random() < 0.5
        self.world.later(span, self._return, "transport failed", quiet)
        if not quiet:
            self.world.later(span + 4 * rng.random(), self._copy, rest)

    def _copy(self, pages: list[int]) -> None:
        rank = self.rank
        if self.source is None:
            self.source = rank.engine.cluster.transports.get(self.start.transport_session)
        source = self.source
        if not self.may_write or rank.dead or source is None or source.dead:
            return
        for page in pages:
            block = int(self.start.producer_blocks[0][page])
            rank.write_page(self.job, page, source, source.memory[block])

    def _finish(self, pages: list[int]) -> None:
        self._copy(pages)
        if self.source is None or self.source.dead:
            self._return("connection reset", self.world.rng.random() < 0.5)
        else:
            self._return(None, quiet=True)

    def _return(self, error: str | None, quiet: bool, chunks: int = 0) -> None:
        """The engine call comes back; a paused process notices when it goes on."""
        world, rank = self.world, self.rank
        if self._returned or rank.dead:
            return
        if world.now < rank.paused_until:
            world.at(rank.paused_until, self._return, error, quiet, chunks)
            return
        self._returned = True
        if quiet:
            self.may_write = False
        self.job.last_return = world.now
        outcome = ReadOutcome(error is None, rank.clock(), error=error, transport_dead=quiet, chunks=chunks)
        world.note(rank.name, "read of", self.job.request_id, "returned", error or "well", "quiet" if quiet else "wild")
        world.later(0.002 * world.rng.random(), rank.call, rank.machine.read_finished, self.start.read_id, outcome)

    def stop(self) -> None:
        """The machine does not count it any more; the engine may or may not come back early."""
        self.counted = False
        if self.world.rng.random() < 0.5 and not self._returned:
            self.world.later(0.05 * self.world.rng.random(), self._return, "stopped", True)

    def fence(self) -> None:
        self.counted = False
        self.world.later(2 * self.world.rng.random(), self._fenced)

    def _fenced(self) -> None:
        if self.rank.dead:
            return
        self.may_write = False
        self.job.last_return = max(self.world.now, self.rank.paused_until)
        self.rank.call(self.rank.machine.read_fenced, self.start.read_id)
