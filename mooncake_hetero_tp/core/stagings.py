"""A consumer rank's ring: pulls that are read chunk by chunk, and who has which slot. No I/O.

Its promises, which the simulation holds it to:

- a chunk is asked for only with a slot of our own to read it into, so that whoever holds a slot of the producer
  waits for nothing but its own read;
- a slot is used again only when its read has returned well, or cannot write any more: a failed one is in
  quarantine until it is fenced;
- what a chunk's read brought counts as that of any read does: if it returned before the deadline.

States and transitions are in `core/states.py`, shares and turns in `core/slots.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mooncake_hetero_tp.core.asking import ConsumerConfig
from mooncake_hetero_tp.core.backoff import Backoff
from mooncake_hetero_tp.core.effects import ConsumerEffect, FenceRead, Plan, ReadId, ReadOutcome, Send, StartChunk
from mooncake_hetero_tp.core.messages import MAX_CUTS, MAX_WANTED, Offer, PairCut, Stage, Staged
from mooncake_hetero_tp.core.pulls import PairPull
from mooncake_hetero_tp.core.slots import Slot, SlotTable
from mooncake_hetero_tp.core.states import FETCH, Fetch, FetchEvent, after
from mooncake_hetero_tp.core.timers import Timers

Cuts = Callable[[Plan], tuple[PairCut, ...]]
"""What the producer must know of a plan (`core.cuts.pair_cuts`)."""


@dataclass(slots=True, eq=False)
class ChunkFetch:
    """One chunk that has got a slot."""

    staging: Staging
    number: int
    slot: Slot
    read_id: ReadId
    state: Fetch = Fetch.ASKED

    @property
    def runs(self) -> bool:
        """Whether its read has not returned."""
        return self.state in (Fetch.READING, Fetch.STOPPING)

    def step(self, event: FetchEvent) -> bool:
        """Make a transition; False: refused."""
        state = after(FETCH, self.state, event)
        if state is not None:
            self.state = state
        return state is not None


@dataclass(slots=True, eq=False)
class Staging:
    """One pull that is read chunk by chunk."""

    pull: PairPull
    count: int
    """Chunks of the whole pull."""
    chunk_bytes: int
    cuts: tuple[PairCut, ...]
    backoff: Backoff
    chunks: dict[int, ChunkFetch] = field(default_factory=dict)
    """Those that the producer is asked for, or that are being read."""
    begun: int = 0
    """Chunks that have got a slot; they get it in order."""
    done: int = 0
    serial: int = 0
    """Of the last Stage; 0: none was sent."""
    heard: bool = True
    """Whether the producer has answered anything since."""
    falls_back: bool = False
    """No further chunk is asked for; read directly when none is being read any more."""
    dropped: bool = False
    """Given up; the producer was sent Cancel."""

    @property
    def running(self) -> list[ChunkFetch]:
        return [chunk for chunk in self.chunks.values() if chunk.runs]

    @property
    def complete(self) -> bool:
        return self.done == self.count

    @property
    def hopeless(self) -> bool:
        """Whether it lacks a chunk whose read is not even under way."""
        return self.falls_back or self.done + len(self.running) < self.count

    @property
    def unanswered(self) -> bool:
        return not self.heard or any(chunk.state is Fetch.ASKED for chunk in self.chunks.values())


class Stagings:
    """All staged pulls of one consumer rank, and its ring."""

    def __init__(
        self, config: ConsumerConfig, read_ids: Iterator[ReadId], cuts: Cuts, out: list[ConsumerEffect]
    ) -> None:
        self._config = config
        self._read_ids = read_ids
        self._cuts = cuts
        self._out = out
        self._window = max(1, min(config.staging_window, MAX_WANTED))
        self._slots: SlotTable[Staging] = SlotTable(config.staging.slots if config.staging else 0)
        self._by_pull: dict[PairPull, Staging] = {}
        self._reads: dict[ReadId, ChunkFetch] = {}
        """Running ones, and those whose slots are in quarantine."""
        self._changed: dict[Staging, None] = {}
        """Those whose last Stage is out of date."""
        self._timers: Timers[Staging] = Timers()

    def __len__(self) -> int:
        return len(self._by_pull)

    @property
    def fencing(self) -> bool:
        """Whether any slot is in quarantine."""
        return self._slots.quarantined > 0

    def of(self, pull: PairPull) -> Staging | None:
        return self._by_pull.get(pull)

    def offer(self, pull: PairPull) -> Offer | None:
        """The slots that one pull can have at most, and what they hold; None: this pull cannot be staged."""
        ours, theirs = self._config.staging, pull.welcome.staging
        if ours is None or theirs is None or len(self._cuts(pull.plan)) > MAX_CUTS:
            return None
        return Offer(min(ours.slot_bytes, theirs.slot_bytes), min(ours.slots, theirs.slots, self._window))

    def reads_of(self, pull: PairPull) -> list[ReadId]:
        """Reads of its chunks that have not returned."""
        staging = self._by_pull.get(pull)
        return [chunk.read_id for chunk in staging.running] if staging else []

    def running(self, read_id: ReadId) -> ChunkFetch | None:
        """The chunk that this read is of, if it has not returned."""
        chunk = self._reads.get(read_id)
        return chunk if chunk is not None and chunk.runs else None

    # --- time ------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        return self._timers.next_due()

    def silent(self, now: float) -> Iterator[PairPull]:
        """Repeat what is unanswered; the pulls whose producers have been silent for too long."""
        for staging in self._timers.expired(now):
            if staging.backoff.silent_for(now) >= self._config.silence_s:
                yield staging.pull
            else:
                self._say(staging)
                self._await(staging, now)

    def flush(self, now: float) -> None:
        """Hand out slots, and tell producers what has changed: one Stage, however much it was."""
        while (taken := self._slots.take()) is not None:
            staging, slot = taken
            staging.chunks[staging.begun] = ChunkFetch(staging, staging.begun, slot, next(self._read_ids))
            staging.begun += 1
            self._changed[staging] = None
        changed, self._changed = self._changed, {}
        for staging in changed:
            if staging.chunks or staging.serial:
                self._say_anew(staging)
                self._await(staging, now)

    # --- pulls -----------------------------------------------------------------------------------

    def begin(self, pull: PairPull, chunks: int, chunk_bytes: int) -> None:
        backoff = Backoff(self._config.resend_s, self._config.resend_max_s)
        staging = Staging(pull, chunks, chunk_bytes, self._cuts(pull.plan), backoff)
        self._by_pull[pull] = staging
        self._want_slots(staging)

    def on_staged(self, pull: PairPull, message: Staged, now: float) -> str | None:
        """Read a chunk; what is wrong with the message, if anything is."""
        staging = self._by_pull.get(pull)
        if staging is None:
            return None
        chunk = staging.chunks.get(message.chunk)
        if message.length_bytes > staging.chunk_bytes:
            return f"staged {message.length_bytes} bytes as one chunk, expected at most {staging.chunk_bytes}"
        in_time = now < pull.deadline and not pull.stopped
        if chunk is not None and in_time and chunk.step(FetchEvent.STAGED):
            self._read(chunk, message)
        self._on_answer(staging, now + self._config.resend_s)
        return None

    def on_waiting(self, pull: PairPull, now: float) -> None:
        """The producer is there, and has no slot for us yet, or nothing to say."""
        staging = self._by_pull.get(pull)
        if staging is not None:
            self._on_answer(staging, now + self._config.heartbeat_s)

    def remind(self, pull: PairPull) -> None:
        """Say again what is wanted, whatever was answered: an answer to an older Stage proves nothing."""
        staging = self._by_pull.get(pull)
        if staging is not None and staging.serial:
            self._say(staging)

    def returned(self, chunk: ChunkFetch, outcome: ReadOutcome, *, counts: bool) -> None:
        """The read of a chunk has returned."""
        staging = chunk.staging
        wild = not outcome.ok and not outcome.transport_dead
        chunk.step(FetchEvent.WILD if wild else FetchEvent.READ if counts else FetchEvent.LOST)
        del staging.chunks[chunk.number]
        if wild:
            self._slots.quarantine(chunk.slot)
            self._out.append(FenceRead(chunk.read_id, staging.pull.welcome.transport_session))
        else:
            self._slots.give_back(chunk.slot)
            del self._reads[chunk.read_id]
        staging.done += chunk.state is Fetch.DONE
        if not staging.dropped:
            self._want_slots(staging)
            self._changed[staging] = None

    def fenced(self, read_id: ReadId) -> bool:
        """Nothing of this read can write any more; False: it is none of a chunk in quarantine."""
        chunk = self._reads.get(read_id)
        if chunk is None or not chunk.step(FetchEvent.FENCED):
            return False
        del self._reads[read_id]
        self._slots.end_quarantine(chunk.slot)
        return True

    def fall_back(self, pull: PairPull) -> bool:
        """Ask for no chunk any more; those being read go on. False: nothing was asked for."""
        staging = self._by_pull.get(pull)
        if staging is None or staging.falls_back or staging.dropped:
            return False
        staging.falls_back = True
        self._give_up_asking(staging)
        self._changed[staging] = None
        return True

    def drop(self, pull: PairPull) -> None:
        """Given up: what is being read does not count; slots of what is not go back."""
        staging = self._by_pull.get(pull)
        if staging is not None:
            staging.dropped = True
            self._give_up_asking(staging)
            self._changed.pop(staging, None)
            for chunk in staging.running:
                chunk.step(FetchEvent.DROP)

    def forget(self, pull: PairPull) -> None:
        """No chunk is being read; tell the producer that none will be."""
        staging = self._by_pull.pop(pull, None)
        if staging is not None:
            self._timers.disarm(staging)
            self._changed.pop(staging, None)
            if staging.serial and not staging.dropped:
                self._say_anew(staging)

    # --- chunks ----------------------------------------------------------------------------------

    def _want_slots(self, staging: Staging) -> None:
        """So many that its window is full."""
        more = min(self._window - len(staging.chunks), staging.count - staging.begun)
        self._slots.want(staging, 0 if staging.falls_back else more)

    def _give_up_asking(self, staging: Staging) -> None:
        self._timers.disarm(staging)
        self._slots.want(staging, 0)
        for chunk in [chunk for chunk in staging.chunks.values() if not chunk.runs]:
            chunk.step(FetchEvent.DROP)
            del staging.chunks[chunk.number]
            self._slots.give_back(chunk.slot)

    def _read(self, chunk: ChunkFetch, message: Staged) -> None:
        pull, asked = chunk.staging.pull, chunk.staging.pull.request.asked
        self._reads[chunk.read_id] = chunk
        self._out.append(
            StartChunk(
                read_id=chunk.read_id,
                request_id=asked.request_id,
                producer=pull.welcome.identity,
                transport_session=pull.welcome.transport_session,
                address=message.address,
                length_bytes=message.length_bytes,
                gather_us=message.gather_us,
                slot=chunk.slot,
                chunk=chunk.number,
                chunk_bytes=chunk.staging.chunk_bytes,
                plan=pull.plan,
                ranges=asked.ranges,
                consumer_blocks=asked.blocks,
                deadline=pull.deadline,
            )
        )

    # --- questions -------------------------------------------------------------------------------

    def _say_anew(self, staging: Staging) -> None:
        staging.serial += 1
        staging.heard = False
        staging.backoff.restart()
        self._say(staging)

    def _say(self, staging: Staging) -> None:
        pull = staging.pull
        if pull.stopped:  # what we hold of the producer's went with the lease
            return
        ranges = pull.request.asked.ranges
        message = Stage(pull.session, pull.number, staging.serial, tuple(staging.chunks), ranges, staging.cuts)
        self._out.append(Send(pull.address, message))

    def _await(self, staging: Staging, now: float) -> None:
        """Come back when it is to be repeated, or the producer counts as silent."""
        if staging.falls_back or staging.pull.stopped:  # refused is refused, and over is over
            return
        repeat = staging.backoff.sent(now)
        since = now if staging.backoff.silent_since is None else staging.backoff.silent_since
        self._timers.arm(staging, min(repeat, since + self._config.silence_s))

    def _on_answer(self, staging: Staging, next_at: float) -> None:
        staging.heard = True
        staging.backoff.heard(next_at)
        if staging.unanswered and not (staging.falls_back or staging.pull.stopped):
            self._timers.arm(staging, next_at)
        else:
            self._timers.disarm(staging)
