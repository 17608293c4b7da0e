"""The actor of a worker's driver thread: decodes for the machines and carries their effects out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from mooncake_hetero_tp.core.codec import decode_from_consumer, decode_from_producer, encode
from mooncake_hetero_tp.core.consumer import ConsumerMachine
from mooncake_hetero_tp.core.effects import (
    ConsumerEffect,
    ExtendRead,
    FenceRead,
    FinishedSending,
    Gather,
    GatherId,
    GatherOutcome,
    Notice,
    ProducerEffect,
    PullRequest,
    ReadId,
    Reply,
    Report,
    Resolve,
    ResolvedEngine,
    ResolveFailed,
    Send,
    StartChunk,
    StartRead,
    StopRead,
)
from mooncake_hetero_tp.core.messages import ReleaseAck
from mooncake_hetero_tp.core.producer import ProducerMachine
from mooncake_hetero_tp.errors import LocalUsageError, PeerProtocolError
from mooncake_hetero_tp.io.control import ControlChannel, FromConsumer, FromProducer, Inbox
from mooncake_hetero_tp.io.gathers import Gathers
from mooncake_hetero_tp.io.ledger import Ledger
from mooncake_hetero_tp.io.reads import ReadDone, Reads
from mooncake_hetero_tp.io.stats import PullRecord, StatsBook
from mooncake_hetero_tp.io.work import StepWork
from mooncake_hetero_tp.types import Identity, RequestId

logger = logging.getLogger(__name__)

Effect = ProducerEffect | ConsumerEffect


class Machines(NamedTuple):
    """A worker's machines; either may be absent."""

    producer: ProducerMachine | None
    consumer: ConsumerMachine | None


class Surroundings(NamedTuple):
    """What a driver acts on."""

    channel: ControlChannel
    reads: Reads
    gathers: Gathers | None
    """None: this worker stages nothing."""
    ledger: Ledger
    book: StatsBook
    resolve: Callable[[Resolve], None]
    """Carries out a Resolve elsewhere; `Driver.resolved` gets the answer."""
    failed: Callable[[BaseException], None]
    """Called once if the driver's thread fails."""


@dataclass(slots=True)
class _Load:
    """A request under way, for its log lines."""

    asked: PullRequest
    began: float
    reads: list[ReadDone] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return max((tokens.count for tokens in self.asked.ranges), default=0)


class Driver:
    """Feeds the machines and performs their effects; see `Loop` for who calls what."""

    def __init__(self, machines: Machines, around: Surroundings) -> None:
        self._producer, self._consumer = machines
        self._around = around
        self._loads: dict[RequestId, _Load] = {}
        self._bad_frames = 0
        self._dropped_seen = 0

    # --- what vLLM's worker asks -----------------------------------------------------------------

    def step(self, work: StepWork, now: float) -> None:
        """One engine step's work, in the order in which vLLM thinks of it."""
        if self._producer is not None:
            self._hand_over(self._producer, work, now)
        if self._consumer is not None:
            for pull in work.pulls:
                self._load(self._consumer, pull, now)
            for request_id in work.cancelled:
                self._perform(self._consumer.cancel(request_id, now), now)

    def _hand_over(self, producer: ProducerMachine, work: StepWork, now: float) -> None:
        for kept in work.kept:
            try:
                self._perform(producer.keep(kept, now), now)
            except LocalUsageError:
                logger.exception("request %s is not handed over", kept.request_id)
                self._around.ledger.sent(kept.request_id)
        for written in work.ready:
            self._perform(producer.mark_ready(written.transfer_id, written.request_id, now), now)
        for ended in work.aborted:
            self._perform(producer.abort(ended.transfer_id, ended.request_id, now), now)

    def _load(self, consumer: ConsumerMachine, pull: PullRequest, now: float) -> None:
        try:
            effects = consumer.start(pull, now)
        except LocalUsageError:
            logger.exception("request %s is not loaded", pull.request_id)
            if pull.request_id not in self._loads:
                self._around.ledger.loaded(pull.request_id, failed=True)
            return
        self._loads[pull.request_id] = _Load(pull, now)
        self._perform(effects, now)

    # --- what other threads answer ---------------------------------------------------------------

    def resolved(self, answer: ResolvedEngine | ResolveFailed, now: float) -> None:
        """The answer to a Resolve."""
        if self._consumer is not None:
            self._perform(self._consumer.resolved(answer, now), now)

    def read_done(self, done: ReadDone, now: float) -> None:
        """The answer to a StartRead or StartChunk."""
        if self._consumer is None:
            return
        load = self._loads.get(done.start.request_id)
        if load is not None:
            load.reads.append(done)
        self._around.book.add("reads_failed", int(not done.outcome.ok))
        self._around.book.add("replaced_sessions", done.tally.replaced_sessions)
        self._perform(self._consumer.read_finished(done.start.read_id, done.outcome, now), now)

    def read_fenced(self, read_id: ReadId, now: float) -> None:
        """The answer to a FenceRead."""
        if self._consumer is not None:
            self._perform(self._consumer.read_fenced(read_id, now), now)

    def gathered(self, gather_id: GatherId, outcome: GatherOutcome, now: float) -> None:
        """The answer to a Gather."""
        if self._producer is None:
            return
        self._around.book.add("chunks_packed", int(outcome.error is None))
        self._around.book.add("gathers_failed", int(outcome.error is not None))
        self._perform(self._producer.gathered(gather_id, outcome, now), now)

    # --- what the loop calls ---------------------------------------------------------------------

    def received(self, inbox: Inbox, now: float) -> None:
        for from_consumer in inbox.from_consumers:
            self._from_consumer(from_consumer, now)
        for from_producer in inbox.from_producers:
            self._from_producer(from_producer, now)

    def _from_consumer(self, got: FromConsumer, now: float) -> None:
        if self._producer is None:
            return
        try:
            effects = self._producer.receive(got.peer, decode_from_consumer(got.frame), now)
        except PeerProtocolError as error:
            self._bad_frame("a consumer", error)
        else:
            self._perform(effects, now)

    def _from_producer(self, got: FromProducer, now: float) -> None:
        if self._consumer is None:
            return
        try:
            message = decode_from_producer(got.frame)
            if isinstance(message, ReleaseAck):
                return
            effects = self._consumer.receive(got.address, message, now)
        except PeerProtocolError as error:
            self._bad_frame(got.address, error)
        else:
            self._perform(effects, now)

    def _bad_frame(self, who: str, error: PeerProtocolError) -> None:
        """Logged when the count reaches a power of two, so that a babbling peer does not fill the log."""
        self._around.book.add("bad_frames")
        self._bad_frames += 1
        if self._bad_frames & (self._bad_frames - 1) == 0:
            logger.warning("message of %s is ignored (%d so far): %s", who, self._bad_frames, error)

    def tick(self, now: float) -> None:
        """First in every turn, so that what expires is freed here and nowhere else."""
        if self._producer is not None:
            effects = self._producer.tick(now)
            expired = sum(isinstance(effect, FinishedSending) for effect in effects)
            self._around.book.add("sends_expired", expired)
            self._perform(effects, now)
        if self._consumer is not None:
            self._perform(self._consumer.tick(now), now)

    def next_deadline(self) -> float | None:
        machines = (self._producer, self._consumer)
        dues = [due for machine in machines if machine and (due := machine.next_deadline()) is not None]
        return min(dues, default=None)

    def closing(self, now: float) -> None:
        if self._consumer is not None:
            self._perform(self._consumer.close(now), now)
        if self._producer is not None:
            self._perform(self._producer.close(now), now)

    def drained(self) -> bool:
        return all(machine is None or machine.drained for machine in (self._producer, self._consumer))

    def crashed(self, error: BaseException) -> None:
        self._around.failed(error)

    def count_frames(self) -> None:
        """Bring the book up to date with the channel's count of dropped frames."""
        dropped = self._around.channel.counts.dropped
        self._around.book.add("frames_dropped", dropped - self._dropped_seen)
        self._dropped_seen = dropped

    # --- effects ---------------------------------------------------------------------------------

    def _perform(self, effects: Iterable[Effect], now: float) -> None:
        for effect in effects:
            self._do(effect, now)

    def _do(self, effect: Effect, now: float) -> None:
        around = self._around
        match effect:
            case Reply(peer, message):
                around.channel.reply(peer, encode(message))
            case Send(address, message):
                around.channel.send(address, encode(message), now)
            case StartRead() | StartChunk() | ExtendRead() | StopRead() | FenceRead():
                around.reads.carry_out(effect)
            case Gather():
                self._gather(effect)
            case Resolve():
                around.resolve(effect)
            case Report():
                self._report(effect, now)
            case FinishedSending(request_id):
                around.ledger.sent(request_id)
                around.book.add("sends_done")
            case Notice(level, text):
                logger.log(logging.getLevelNamesMapping()[level.value.upper()], "%s", text)

    def _gather(self, gather: Gather) -> None:
        if self._around.gathers is None:
            raise LocalUsageError(f"{gather}: this worker has no staging ring")
        self._around.gathers.start(gather)

    def _report(self, report: Report, now: float) -> None:
        failed = not report.ok and not report.cancelled
        load = self._loads.pop(report.request_id, None)
        outcome = "loads_done" if report.ok else "loads_cancelled" if report.cancelled else "loads_failed"
        self._around.book.add(outcome)
        if load is not None and report.ok:
            self._count_pulls(load, now)
        self._around.ledger.loaded(report.request_id, failed=failed)

    def _count_pulls(self, load: _Load, now: float) -> None:
        """One record for each producer rank that was read from."""
        by_producer: dict[Identity, list[ReadDone]] = {}
        for done in load.reads:
            if done.outcome.ok:
                by_producer.setdefault(done.start.producer, []).append(done)
        for producer, ended in by_producer.items():
            reads = _counted(ended)
            record = PullRecord(
                request_id=load.asked.request_id,
                transfer_id=load.asked.transfer_id,
                producer=producer,
                tokens=load.tokens,
                bytes=sum(done.tally.bytes for done in reads),
                descriptors=sum(done.tally.descriptors for done in reads),
                batches=sum(done.tally.batches for done in reads),
                retries=sum(done.tally.retries for done in reads),
                read_s=sum(done.seconds for done in reads),
                total_s=now - load.began,
                chunks=sum(isinstance(done.start, StartChunk) for done in reads),
                why=next((done.choice.why for done in reads if done.choice is not None), ""),
            )
            self._around.book.pull(record)
            logger.info("%s", record)


def _counted(reads: list[ReadDone]) -> list[ReadDone]:
    """What brought the bytes: a pull that could not be staged to its end was read directly, from its start."""
    return [done for done in reads if isinstance(done.start, StartRead) and not done.outcome.chunks] or reads
