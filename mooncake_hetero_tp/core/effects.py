"""What goes into the protocol machines and what comes out of them, as values.

A machine takes one input record and a clock value and returns a list of effects; it never performs
one. A driver (`io/runtime.py`, `io/release.py`, the simulator) carries the effects out, in order, and
feeds the answers back:

    effect          carried out by                                answered by
    Reply           sending on the producer's ROUTER socket       -
    Gather          bind + gather in a worker thread              producer.gathered(...), always, once
    Send            sending on the DEALER for that address        -
    Resolve         GET /query on the bootstrap server            machine.resolved(...), always, once
    StartRead       bind + engine.read in a worker thread         consumer.read_finished(...), always, once
    StartChunk      engine.read + scatter in a worker thread      consumer.read_finished(...), always, once
    ExtendRead      moving that read's deadline                   -
    StopRead        submitting no further batch of it             (read_finished stays due)
    FenceRead       replacing the transport session               consumer.read_fenced(...), when nothing can write
    Report          telling vLLM: finished_recving / failed       -
    FinishedSending telling vLLM: finished_sending                -
    Notice          the log                                       -

A StartRead with `staging` may be answered, before anything was read, with the number of chunks it would rather be
staged in. Each StartChunk then reads one packed chunk from the producer's ring into a slot of our own and scatters
it into the pages. Its worker takes `returned_at` as soon as the engine call has returned, and scatters only if that
is before the deadline and the read was not stopped; otherwise it answers "not ok". It answers when its scatter is
done. ExtendRead, StopRead and FenceRead are for these reads too. A chunk that failed may still write into its
*slot*, which waits for the fence, but not into the pages, so its request does not.

Block ids are one-dimensional integer arrays, one per KV cache group, in *logical* blocks: position i is
page i of the request, null pages included. All times are seconds of the driver's one monotonic clock.

Leases are safe only if a driver reads that clock *after* it has received the message that it passes to a
producer machine, and *before* it sends what a consumer machine returns. A transport session must name one process: one that is reused within a lease would let a
read reach the memory of another incarnation.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NewType, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_hetero_tp.core.messages import ConsumerMessage, Offer, PairCut, ProducerMessage
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.core.slots import Slot
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Rank, RequestId, TokenRange, TransferId

ReadId = NewType("ReadId", int)
"""Names one StartRead or StartChunk of one ConsumerMachine; never used twice."""
GatherId = NewType("GatherId", int)
"""Names one Gather of one ProducerMachine; never used twice."""
BlockIds: TypeAlias = npt.NDArray[np.integer[Any]]
"""Logical block ids of one group."""
Plan: TypeAlias = Any
"""A `core.plan.PairPlan`; the machines carry it and never look inside."""


class Level(StrEnum):
    """How loud a Notice is; the values are the standard logging names."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


# --- inputs --------------------------------------------------------------------------------------


class Kept(msgspec.Struct, frozen=True, eq=False):
    """Producer: vLLM finished a prefill and keeps its blocks until FinishedSending."""

    request_id: RequestId
    transfer_id: TransferId
    blocks: tuple[BlockIds, ...]
    computed_tokens: int
    ready: bool
    """False while the GPU event of its last step is pending; `mark_ready` follows."""


class PullRequest(msgspec.Struct, frozen=True, eq=False):
    """Consumer: load these token ranges of a transfer into these blocks (one range, one list per group).

    `bootstrap` is the producer's bootstrap address as the proxy gave it. All ranges empty = a full
    local hit: reported at once, nothing is sent (the release is the scheduler's, see `releaser.py`).
    """

    request_id: RequestId
    transfer_id: TransferId
    engine_id: EngineId
    bootstrap: str
    ranges: tuple[TokenRange, ...]
    blocks: tuple[BlockIds, ...]


class ResolvedEngine(msgspec.Struct, frozen=True):
    """The bootstrap's answer: every rank of an engine, its control address and, where known, incarnation."""

    bootstrap: str
    engine_id: EngineId
    addresses: dict[Rank, str]
    incarnations: dict[Rank, Incarnation | None]


class ResolveFailed(msgspec.Struct, frozen=True):
    """The bootstrap did not answer, or does not know the engine; `reason` is for people."""

    bootstrap: str
    engine_id: EngineId
    reason: str


class ReadOutcome(msgspec.Struct, frozen=True):
    """How one StartRead or StartChunk ended."""

    ok: bool
    """Every engine call of the read returned success."""
    returned_at: float
    """Clock value taken right after the last engine call returned, before anything else."""
    bytes: int = 0
    descriptors: int = 0
    error: str | None = None
    transport_dead: bool = False
    """Only looked at when not ok. True: nothing of this read can write any more (its session is known
    dead, or no engine call was made or left unfinished). False: it might; the machine answers FenceRead."""
    chunks: int = 0
    """Not 0: this StartRead has moved nothing and asks to be staged in so many chunks."""


class GatherOutcome(msgspec.Struct, frozen=True):
    """How one Gather ended; nothing of it runs any more."""

    length_bytes: int = 0
    """What lies in the slot from its start."""
    gather_us: int = 0
    error: str | None = None
    """Why there is nothing in the slot that may be read."""


# --- effects -------------------------------------------------------------------------------------


class Reply(msgspec.Struct, frozen=True):
    """Producer: send to the consumer with this ZMQ routing id."""

    peer: bytes
    message: ProducerMessage


class Gather(msgspec.Struct, frozen=True, eq=False):
    """Producer: pack one chunk of a pull into a slot of our ring.

    Its blocks may be freed while it runs; the machine tells nobody of what it then left in the slot.
    """

    gather_id: GatherId
    request_id: RequestId
    """The producer's; for the log."""
    consumer: Identity
    consumer_table: RankTable
    cuts: tuple[PairCut, ...]
    """With the consumer's table and our own: the plan to cut into chunks."""
    ranges: tuple[TokenRange, ...]
    """One per group of the consumer."""
    chunk: int
    chunk_bytes: int
    """Most bytes of a chunk of this pair."""
    blocks: tuple[BlockIds, ...]
    """Ours, one list per group of ours."""
    slot: Slot


class FinishedSending(msgspec.Struct, frozen=True):
    """Producer: vLLM may free the blocks of this request; exactly once per `keep`."""

    request_id: RequestId


class Send(msgspec.Struct, frozen=True):
    """Consumer, releaser: send to the producer rank at this control address."""

    address: str
    message: ConsumerMessage


class Resolve(msgspec.Struct, frozen=True):
    """Consumer, releaser: ask the bootstrap server where the ranks of this engine are."""

    bootstrap: str
    engine_id: EngineId


class StartRead(msgspec.Struct, frozen=True, eq=False):
    """Consumer: read from one producer rank. The result counts only if it returns before `deadline`."""

    read_id: ReadId
    request_id: RequestId
    producer: Identity
    transport_session: str
    plan: Plan
    ranges: tuple[TokenRange, ...]
    producer_blocks: tuple[BlockIds, ...]
    consumer_blocks: tuple[BlockIds, ...]
    deadline: float
    staging: Offer | None = None
    """The slots that it can have at most, if it may be staged (see `ReadOutcome.chunks`); None: read it directly."""


class StartChunk(msgspec.Struct, frozen=True, eq=False):
    """Consumer: read one staged chunk into our slot, and scatter it into the pages; see above."""

    read_id: ReadId
    request_id: RequestId
    producer: Identity
    transport_session: str
    address: int
    """Where it lies packed, in the producer's memory."""
    length_bytes: int
    gather_us: int
    """How long the producer took to pack it."""
    slot: Slot
    chunk: int
    chunk_bytes: int
    """Most bytes of a chunk of this pair."""
    plan: Plan
    ranges: tuple[TokenRange, ...]
    consumer_blocks: tuple[BlockIds, ...]
    deadline: float


class ExtendRead(msgspec.Struct, frozen=True):
    """Consumer: the lease of a running read was renewed until `deadline`."""

    read_id: ReadId
    deadline: float


class StopRead(msgspec.Struct, frozen=True):
    """Consumer: the read no longer counts; start no further engine call for it."""

    read_id: ReadId


class FenceRead(msgspec.Struct, frozen=True):
    """Consumer: a failed read may still be writing; make sure that it cannot, then call `read_fenced`."""

    read_id: ReadId
    transport_session: str


class Report(msgspec.Struct, frozen=True):
    """Consumer: the load of this request ended on this rank; exactly once per `start`.

    No engine call of the request is running, and nothing can write into its pages, when this is returned.
    """

    request_id: RequestId
    ok: bool
    reason: str | None = None
    cancelled: bool = False
    """It failed because `cancel` asked for it, so nobody waits for the bytes."""


class Notice(msgspec.Struct, frozen=True):
    """Something for the log."""

    level: Level
    text: str


ProducerEffect: TypeAlias = Reply | Gather | FinishedSending | Notice
ConsumerEffect: TypeAlias = (
    Send | Resolve | StartRead | StartChunk | ExtendRead | StopRead | FenceRead | Report | Notice
)
ReleaserEffect: TypeAlias = Send | Resolve | Notice
