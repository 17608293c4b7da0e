"""Granted pulls of a consumer rank, from the Grant to the last read: directly, or chunk by chunk. No I/O.

What fails or completes a request is told through the two callbacks of `Reader`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from mooncake_hetero_tp.core.asking import Asker, ConsumerConfig
from mooncake_hetero_tp.core.codec import unpack_blocks
from mooncake_hetero_tp.core.effects import (
    ConsumerEffect,
    ExtendRead,
    FenceRead,
    Level,
    Notice,
    ReadId,
    ReadOutcome,
    StartRead,
    StopRead,
)
from mooncake_hetero_tp.core.messages import Grant, Offer, Staged
from mooncake_hetero_tp.core.pulls import PairPull, Request, read_failure
from mooncake_hetero_tp.core.stagings import ChunkFetch, Cuts, Stagings
from mooncake_hetero_tp.core.states import Stage, StageEvent
from mooncake_hetero_tp.core.timers import Timers
from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.types import PullId


class Reader:
    """Reads of all pulls, and the consumer rank's ring."""

    def __init__(
        self,
        config: ConsumerConfig,
        pulls: dict[PullId, PairPull],
        timers: Timers[Request | PairPull],
        asker: Asker,
        cuts: Cuts,
        out: list[ConsumerEffect],
        *,
        fail: Callable[[Request, str], None],
        conclude: Callable[[Request], None],
    ) -> None:
        """`pulls`, `timers` and `out` are the machine's own; pulls that are over leave `pulls`."""
        self._pulls = pulls
        self._timers = timers
        self._asker = asker
        self._out = out
        self._fail = fail
        self._conclude = conclude
        self._read_ids = map(ReadId, count(1))
        self._reads: dict[ReadId, PairPull] = {}
        """StartReads that have not returned, or not been fenced."""
        self.stagings = Stagings(config, self._read_ids, cuts, out)

    def __len__(self) -> int:
        """Reads that have not returned or not been fenced, and staged pulls."""
        return len(self._reads) + len(self.stagings)

    # --- leases ----------------------------------------------------------------------------------

    def begin(self, pull: PairPull, grant: Grant, deadline: float) -> None:
        """The first Grant."""
        pull.step(StageEvent.GRANT)
        pull.lease_s = grant.lease_s
        pull.deadline = deadline
        pull.blocks = grant.blocks
        self._read(pull)

    def extend(self, pull: PairPull, deadline: float, now: float) -> None:
        """A renewal was granted; one that comes after the lease's end does not bring a stopped read back."""
        if deadline <= pull.deadline or pull.stopped or not pull.step(StageEvent.GRANT):
            return
        pull.deadline = deadline
        for read_id in self._running(pull):
            self._out.append(ExtendRead(read_id, deadline))
        self.stagings.remind(pull)
        self._asker.renew_later(pull, deadline - pull.lease_s, now)

    def end_lease(self, pull: PairPull) -> None:
        """The lease is over; but what runs may have returned in time."""
        self._stop(pull)
        self._go_on(pull)

    def give_up(self, pull: PairPull) -> None:
        """The pull was dropped; over at once where nothing of it runs."""
        self.stagings.drop(pull)
        if pull.stage is Stage.STOPPING:
            self._stop(pull)
            self._let_go(pull)
        else:
            self._forget(pull)

    # --- answers of the producer -----------------------------------------------------------------

    def on_staged(self, pull: PairPull, message: Staged, now: float) -> None:
        """Read the chunk, if it is one that is asked for."""
        if (wrong := self.stagings.on_staged(pull, message, now)) is not None:
            self._fail(pull.request, f"{pull.name}: {wrong}")

    def fall_back(self, pull: PairPull) -> None:
        """The producer cannot stage it: read it directly, as soon as no chunk of it is being read."""
        if self.stagings.fall_back(pull):
            self._out.append(Notice(Level.WARNING, f"{pull.name} cannot stage a pull; it is read directly"))
            self._go_on(pull)

    # --- answers of the driver -------------------------------------------------------------------

    def finished(self, read_id: ReadId, outcome: ReadOutcome) -> None:
        """A read has returned.

        Raises:
            LocalUsageError: no such read is running, or it asks for chunks and cannot; nothing changes.
        """
        chunk, pull = self.stagings.running(read_id), self._reads.get(read_id)
        if chunk is None and (pull is None or pull.stage not in (Stage.READING, Stage.STOPPING)):
            raise LocalUsageError(f"read {read_id}: expected a read that runs; it was never started or has finished")
        if outcome.chunks and (pull is None or self._offer(pull) is None):
            raise LocalUsageError(f"read {read_id}: expected bytes, got a wish for {outcome.chunks} chunks")
        if chunk is not None:
            self._on_chunk(chunk, outcome)
        elif pull is not None:
            self._on_read(pull, outcome)

    def fenced(self, read_id: ReadId) -> None:
        """Nothing of this read can write any more.

        Raises:
            LocalUsageError: no fence was asked for; nothing changes.
        """
        if self.stagings.fenced(read_id):
            return
        pull = self._reads.get(read_id)
        if pull is None or not pull.step(StageEvent.FENCED):
            raise LocalUsageError(f"read {read_id}: expected a read that FenceRead named")
        self._forget(pull)
        self._conclude(pull.request)

    def _on_read(self, pull: PairPull, outcome: ReadOutcome) -> None:
        failure = read_failure(pull, outcome)
        if outcome.chunks and not failure and pull.step(StageEvent.CHUNKED):
            self._stage(pull, outcome.chunks)
            return
        wild = not outcome.ok and not outcome.transport_dead
        if pull.stage is Stage.READING and failure:
            self._asker.cancel(pull)
            pull.request.link.suspect |= not (outcome.ok or pull.stopped)
        pull.step(StageEvent.WILD if wild else StageEvent.LOST if failure else StageEvent.READ)
        self._timers.disarm(pull)
        if wild and pull.read_id is not None:
            self._out.append(FenceRead(pull.read_id, pull.welcome.transport_session))
        else:
            self._forget(pull)
        if failure:
            self._fail(pull.request, f"{pull.name}: {failure}")
        self._conclude(pull.request)

    def _on_chunk(self, chunk: ChunkFetch, outcome: ReadOutcome) -> None:
        pull = chunk.staging.pull
        failure = read_failure(pull, outcome)
        self.stagings.returned(chunk, outcome, counts=failure is None)
        if failure and pull.stage is Stage.STAGING:
            pull.request.link.suspect |= not (outcome.ok or pull.stopped)
            self._fail(pull.request, f"{pull.name}: {failure}")
        self._go_on(pull)
        self._let_go(pull)
        self._conclude(pull.request)

    # --- reads -----------------------------------------------------------------------------------

    def _offer(self, pull: PairPull) -> Offer | None:
        return None if pull.direct_only else self.stagings.offer(pull)

    def _read(self, pull: PairPull) -> None:
        pull.read_id = next(self._read_ids)
        self._reads[pull.read_id] = pull
        asked = pull.request.asked
        self._out.append(
            StartRead(
                read_id=pull.read_id,
                request_id=asked.request_id,
                producer=pull.welcome.identity,
                transport_session=pull.welcome.transport_session,
                plan=pull.plan,
                ranges=asked.ranges,
                producer_blocks=tuple(map(unpack_blocks, pull.blocks)),
                consumer_blocks=asked.blocks,
                deadline=pull.deadline,
                staging=self._offer(pull),
            )
        )

    def _stage(self, pull: PairPull, chunks: int) -> None:
        """Its read has moved nothing, and goes on chunk by chunk."""
        offer = self._offer(pull)
        self._end_read(pull)
        self.stagings.begin(pull, chunks, offer.slot_bytes if offer else 0)
        self._go_on(pull)

    def _go_on(self, pull: PairPull) -> None:
        """A staged pull may be complete, or beyond hope, or done with the last chunk before a fallback."""
        staging = self.stagings.of(pull)
        if staging is None or pull.stage is not Stage.STAGING:
            return
        if staging.complete:
            pull.step(StageEvent.READ)
            self._timers.disarm(pull)
            self._forget(pull)
        elif pull.stopped and staging.hopeless:
            self._fail(pull.request, f"{pull.name}: the lease ended before all chunks were read")
        elif staging.falls_back and not staging.running:
            pull.step(StageEvent.DIRECT)
            pull.direct_only = True
            self.stagings.forget(pull)
            self._read(pull)

    # --- ends ------------------------------------------------------------------------------------

    def _running(self, pull: PairPull) -> list[ReadId]:
        """Its reads that have not returned."""
        return [pull.read_id] if pull.read_id is not None else self.stagings.reads_of(pull)

    def _stop(self, pull: PairPull) -> None:
        if not pull.stopped:
            pull.stopped = True
            self._out.extend(map(StopRead, self._running(pull)))

    def _let_go(self, pull: PairPull) -> None:
        """A pull that was given up is over when nothing of it runs any more."""
        if pull.stage is Stage.STOPPING and not self._running(pull):
            pull.step(StageEvent.LOST)
            self._forget(pull)

    def _end_read(self, pull: PairPull) -> None:
        if pull.read_id is not None:
            self._reads.pop(pull.read_id, None)
            pull.read_id = None

    def _forget(self, pull: PairPull) -> None:
        """No message and no read of this pull means anything any more."""
        self._pulls.pop(pull.number, None)
        self.stagings.forget(pull)
        self._end_read(pull)
