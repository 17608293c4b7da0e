"""Direct or staged: obstacles, measuring a path, refining what is known of it."""

from __future__ import annotations

import queue
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from mooncake_hetero_tp.core.binding import Descriptors
from mooncake_hetero_tp.core.chunks import cut_chunks
from mooncake_hetero_tp.core.cost import Mode, Rates
from mooncake_hetero_tp.core.effects import ReadId, StartChunk, StartRead
from mooncake_hetero_tp.core.forecast import Forecast
from mooncake_hetero_tp.core.messages import Offer
from mooncake_hetero_tp.core.plan import plan_pulls
from mooncake_hetero_tp.core.slots import Slot
from mooncake_hetero_tp.errors import TransferError
from mooncake_hetero_tp.io.choosing import Chooser, Chosen
from mooncake_hetero_tp.io.packer import Packer
from mooncake_hetero_tp.io.pool import WorkerPool
from mooncake_hetero_tp.io.reads import ReadDone, Reads, ReadTools
from mooncake_hetero_tp.io.staging import SCRATCH_BYTES, RingSize, StagingRing
from mooncake_hetero_tp.io.transfer import Deadline, ReadTally
from mooncake_hetero_tp.native.executor import host_executor
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Rank, RequestId, TokenRange
from tests.tables import Dense

SIZE = RingSize(slot_bytes=1 << 20, slots=4)
OFFER = Offer(SIZE.slot_bytes, SIZE.slots)
PRODUCER = Identity(EngineId("p"), Incarnation("aa"), Rank())
PEER = "127.0.0.1:1"
TOKENS = 512


class PacedEngine:
    """An engine that takes `descriptor_s` a descriptor and `call_s` a call, and moves nothing."""

    def __init__(self, descriptor_s: float = 0.0, call_s: float = 0.0) -> None:
        self.descriptor_s = descriptor_s
        self.call_s = call_s
        self.hiccup_s = 0.0
        """What every third call takes more."""
        self.reads: list[Descriptors] = []
        self.broken = False

    def read(self, _peer: str, descriptors: Descriptors, *, deadline: Deadline) -> ReadTally:
        assert deadline.at > 0
        if self.broken:
            raise TransferError("broken")
        self.reads.append(descriptors)
        hiccup_s = 0.0 if len(self.reads) % 3 else self.hiccup_s
        time.sleep(self.call_s + self.descriptor_s * descriptors.count + hiccup_s)
        return ReadTally(descriptors.bytes, descriptors.count, 1)


class Bench:
    """A path on which TP1 -> TP2 reads many small pieces."""

    def __init__(self, mode: Mode = Mode.AUTO, engine: PacedEngine | None = None) -> None:
        shape = {"heads": 4, "layers": 4, "tokens": 16, "blocks": 64, "head_size": 64}
        self.producer = Dense(**shape).table()  # type: ignore[arg-type]
        self.consumer = Dense(**shape, tp=2, base=1 << 41).table()  # type: ignore[arg-type]
        self.plan = plan_pulls(self.consumer, {Rank(): self.producer})[Rank()]
        self.engine = engine or PacedEngine()
        ring = StagingRing(1 << 42, SIZE, lambda: None)
        packer = Packer(self.consumer, ring, host_executor(), null_block=0)
        self.chooser = Chooser(mode, self.engine, packer)  # type: ignore[arg-type]

    def start(self, staging: Offer | None = OFFER) -> StartRead:
        blocks = (np.arange(1, 1 + TOKENS),)
        return StartRead(
            read_id=ReadId(1),
            request_id=RequestId("r"),
            producer=PRODUCER,
            transport_session=PEER,
            plan=self.plan,
            ranges=(TokenRange(0, TOKENS),),
            producer_blocks=blocks,
            consumer_blocks=blocks,
            deadline=1.0,
            staging=staging,
        )

    def choose(self, descriptors: int, piece_bytes: int = 4096, **start: Any) -> Chosen:
        return self.chooser.choose(self.start(**start), Forecast(descriptors, descriptors * piece_bytes), Deadline(1.0))


def test_many_small_pieces_are_staged_and_a_few_are_not() -> None:
    bench = Bench(engine=PacedEngine(100e-6))
    many, few = bench.choose(4096), bench.choose(2)
    assert (many.choice.mode, few.choice.mode) == (Mode.STAGED, Mode.DIRECT)
    assert many.chunks == cut_chunks(bench.plan, (TokenRange(0, TOKENS),), SIZE.slot_bytes).count > 0
    assert few.chunks == 0
    assert "4096 descriptors" in many.choice.why


@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.STAGED])
def test_a_peer_without_a_ring_is_read_directly(mode: Mode) -> None:
    chosen = Bench(mode).choose(4096, staging=None)
    assert (chosen.choice.mode, chosen.chunks) == (Mode.DIRECT, 0)
    assert "no staging memory" in chosen.choice.why


def test_slots_too_small_for_one_piece_mean_direct() -> None:
    chosen = Bench(Mode.STAGED).choose(4096, staging=Offer(16, 4))
    assert chosen.choice.mode is Mode.DIRECT
    assert "cannot be cut and slots have 16" in chosen.choice.why


def test_what_is_set_is_done_without_measuring() -> None:
    bench = Bench(Mode.STAGED)
    assert bench.choose(2).choice.mode is Mode.STAGED
    assert bench.engine.reads == []


def test_a_path_is_measured_once_into_the_scratch_space() -> None:
    bench = Bench(engine=PacedEngine(50e-6))
    bench.choose(4)
    found = bench.chooser.rates(PEER)
    assert 50e-6 <= found.descriptor_s < 1e-3
    ring = bench.chooser.packer.ring
    assert all((read.dst >= ring.scratch).all() for read in bench.engine.reads)
    assert all((read.dst + read.length <= ring.scratch + SCRATCH_BYTES).all() for read in bench.engine.reads)
    source = bench.producer.buffers[0]
    assert all((read.src >= source.address).all() for read in bench.engine.reads)
    assert all((read.src + read.length <= source.end).all() for read in bench.engine.reads)
    measured = len(bench.engine.reads)
    bench.choose(4)
    assert len(bench.engine.reads) == measured


@pytest.mark.parametrize(
    "piece_bytes, count, length",
    [
        (256, 64, 256),
        (1 << 15, 32, 1 << 15),  # what fits into the scratch space
        (1 << 20, 4, 1 << 18),  # a fourth of it at most
    ],
)
def test_a_path_is_measured_in_pieces_as_long_as_those_of_its_first_pull(
    piece_bytes: int, count: int, length: int
) -> None:
    bench = Bench()
    bench.choose(100, piece_bytes)
    shapes = {(read.count, int(read.length[0])) for read in bench.engine.reads}
    assert shapes == {(1, 1), (1, length), (count, length), (1, SCRATCH_BYTES)}
    large = [int(read.src[0]) for read in bench.engine.reads if read.length[0] == SCRATCH_BYTES]
    assert len(large) > 3
    assert len(set(large)) > 1, "what was just read is in a cache"


def test_what_every_call_takes_is_not_the_descriptors() -> None:
    bench = Bench(engine=PacedEngine(100e-6, call_s=5e-3))
    bench.choose(4)
    assert 90e-6 <= bench.chooser.rates(PEER).descriptor_s < 150e-6


def test_a_busy_moment_is_not_the_path() -> None:
    bench = Bench(engine=PacedEngine(10e-6))
    bench.engine.hiccup_s = 0.02
    bench.choose(4)
    assert bench.chooser.rates(PEER).descriptor_s < 50e-6
    assert SCRATCH_BYTES / bench.chooser.rates(PEER).bytes_per_s < 0.01


def test_a_pull_of_nothing_measures_nothing() -> None:
    bench = Bench()
    assert bench.choose(0).choice.mode is Mode.DIRECT
    assert bench.engine.reads == []
    bench.choose(4)
    assert bench.engine.reads, "the path is still unknown"


def test_a_path_that_cannot_be_measured_has_the_default_rates() -> None:
    bench = Bench()
    bench.engine.broken = True
    bench.choose(4)
    assert bench.chooser.rates(PEER) == Rates()


def test_pulls_that_are_not_staged_let_what_is_known_of_staging_age() -> None:
    bench = Bench()
    bench.choose(2)
    for _ in range(20):
        bench.chooser.unpacked(chunk_of(bench), scatter_s=1.0)
    slow = bench.chooser.rates(PEER).scatter_bytes_per_s
    bench.choose(4096, staging=None)
    assert bench.chooser.rates(PEER).scatter_bytes_per_s == slow, "it could not be staged"
    assert bench.choose(2).choice.mode is Mode.DIRECT
    assert bench.chooser.rates(PEER).scatter_bytes_per_s > slow


def test_what_is_set_to_be_direct_lets_nothing_age() -> None:
    bench = Bench(Mode.DIRECT)
    bench.chooser.unpacked(chunk_of(bench), scatter_s=1.0)
    slow = bench.chooser.rates(PEER).scatter_bytes_per_s
    bench.choose(2)
    assert bench.chooser.rates(PEER).scatter_bytes_per_s == slow


def test_overlapping_reads_count_together() -> None:
    """Two reads of 100 descriptors each, at once: the path took both in the time of one."""
    bench = Bench(Mode.STAGED)
    before = bench.chooser.rates(PEER).descriptor_s
    with bench.chooser.watching(PEER) as outer:
        with bench.chooser.watching(PEER) as inner:
            time.sleep(0.01)
            inner.append(ReadTally(100, 1000, 1))
        assert bench.chooser.rates(PEER).descriptor_s == before, "one still runs"
        outer.append(ReadTally(100, 1000, 1))
    assert bench.chooser.rates(PEER).descriptor_s < before, "2,000 in some 10 ms is faster than 25 us each"


def test_a_path_that_is_never_idle_is_refined_too() -> None:
    """Under steady load some read always runs, and a path that slows down must not be believed fast for ever."""
    bench = Bench(Mode.STAGED)
    before = bench.chooser.rates(PEER).descriptor_s
    with bench.chooser.watching(PEER):
        for _ in range(20):
            with bench.chooser.watching(PEER) as tallies:
                time.sleep(0.002)
                tallies.append(ReadTally(100, 16, 1))
        assert bench.chooser.rates(PEER).descriptor_s > before, "125 us each"


def test_chunks_teach_of_chunks_and_not_of_direct_reads() -> None:
    bench, default = Bench(Mode.STAGED), Rates()
    with bench.chooser.watching(PEER, chunk=True) as tallies:
        time.sleep(0.02)
        tallies.append(ReadTally(1 << 20, 1, 1))
    found = bench.chooser.rates(PEER)
    assert found.chunk_s > default.chunk_s
    assert (found.bytes_per_s, found.descriptor_s) == (default.bytes_per_s, default.descriptor_s)


def test_chunks_and_direct_reads_at_once_teach_nothing() -> None:
    bench = Bench(Mode.STAGED)
    with bench.chooser.watching(PEER, chunk=True) as chunk, bench.chooser.watching(PEER) as direct:
        time.sleep(0.02)
        chunk.append(ReadTally(1 << 20, 1, 1))
        direct.append(ReadTally(1 << 20, 500, 1))
    assert bench.chooser.rates(PEER) == Rates()


def test_a_read_that_fails_teaches_nothing() -> None:
    bench = Bench(Mode.STAGED)
    with pytest.raises(TransferError), bench.chooser.watching(PEER):
        raise TransferError("broken")
    assert bench.chooser.rates(PEER) == Rates()


def chunk_of(bench: Bench, number: int = 0, gather_us: int = 10_000) -> StartChunk:
    return StartChunk(
        read_id=ReadId(2),
        request_id=RequestId("r"),
        producer=PRODUCER,
        transport_session=PEER,
        address=1,
        length_bytes=1 << 20,
        gather_us=gather_us,
        slot=Slot(0),
        chunk=number,
        chunk_bytes=1 << 20,
        plan=bench.plan,
        ranges=(TokenRange(0, TOKENS),),
        consumer_blocks=(),
        deadline=1.0,
    )


def test_the_first_chunk_of_a_pull_tells_how_long_asking_takes() -> None:
    bench = Bench(Mode.STAGED)
    bench.choose(4096)
    before = bench.chooser.rates(PEER).round_trip_s
    time.sleep(0.02)
    bench.chooser.answered(chunk_of(bench, 3, gather_us=1000))
    after = bench.chooser.rates(PEER).round_trip_s
    assert after > before
    bench.chooser.answered(chunk_of(bench, 0))
    assert bench.chooser.rates(PEER).round_trip_s == after, "once a pull"


def test_chunks_refine_the_rates_of_packing() -> None:
    bench = Bench(Mode.STAGED)
    bench.chooser.unpacked(chunk_of(bench), scatter_s=1e-6)
    found, default = bench.chooser.rates(PEER), Rates()
    assert found.gather_bytes_per_s < default.gather_bytes_per_s
    assert found.scatter_bytes_per_s > default.scatter_bytes_per_s


def test_a_pull_of_millions_of_pieces_is_staged_without_making_them() -> None:
    """All its descriptors would take 400 MB and a second."""
    like = Dense(heads=8, layers=80, tokens=16, head_size=128, item=2, blocks=600, layout="LBNHC")
    producer, consumer = like.table(), replace(like, tp=2, base=1 << 45, layout="BLHNC").table()
    bench = Bench(Mode.STAGED)
    bench.plan = plan_pulls(consumer, {Rank(): producer})[Rank()]
    tools = ReadTools(
        engine=bench.engine,  # type: ignore[arg-type]
        table=consumer,
        clear_tails=lambda _: None,
        clock=time.monotonic,
        null_block=0,
        packer=bench.chooser.packer,
        chooser=bench.chooser,
    )
    pool = WorkerPool("mht-test", 1)
    done = queue.Queue[ReadDone]()
    tracemalloc.start()
    Reads(tools, pool, done.put, lambda _: None).carry_out(
        msgspec.structs.replace(bench.start(), ranges=(TokenRange(0, TOKENS * 16),), deadline=1e9)
    )
    outcome = done.get(timeout=30).outcome
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert pool.close(5)
    assert outcome.chunks == 80 * TOKENS * 16 * 2 * 4 * 128 * 2 >> 20
    assert peak < 32e6
