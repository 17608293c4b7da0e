"""Packing chunks into ring slots and unpacking them, in real memory."""

from __future__ import annotations

import ctypes
import hashlib
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mooncake_hetero_tp.core.chunks import Chunks, cut_chunks
from mooncake_hetero_tp.core.plan import plan_pulls
from mooncake_hetero_tp.core.slots import Slot
from mooncake_hetero_tp.errors import PlanError
from mooncake_hetero_tp.io import packer
from mooncake_hetero_tp.io.packer import Packer, StagedPull
from mooncake_hetero_tp.io.staging import RingSize, host_ring
from mooncake_hetero_tp.native.executor import host_executor
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.oracle_memory import Arena, Layer, SideSpec, build_rank
from tests.tables import DST, Dense, planned

LAYERS = [Layer("a", units=2, channels=4), Layer("b", units=2, channels=4)]
NOTHING = TokenRange(0, 0)
RANGES = (TokenRange(0, 10), NOTHING)
SIZE = RingSize(slot_bytes=256, slots=2)


class Bench:
    """Two ranks of unlike layouts and block sizes, a ring for each."""

    def __init__(self) -> None:
        specs = SideSpec(block_size=4, num_blocks=8), SideSpec(block_size=8, num_blocks=8, layout="BLNHC")
        self.producer, self.consumer = (build_rank(spec, LAYERS, 2, Rank(), Arena(1 << 16)) for spec in specs)
        self.rings = host_ring(SIZE), host_ring(SIZE)
        self.sender, self.receiver = (
            Packer(memory.table, ring, host_executor(), null_block=0)
            for memory, ring in zip((self.producer, self.consumer), self.rings, strict=True)
        )
        self.blocks = (np.array([2, 5, 7]), np.array([1])), (np.array([4, 1]), np.array([1]))
        plan = plan_pulls(self.consumer.table, {Rank(): self.producer.table})[Rank()]
        self.sent, self.received = (StagedPull(plan, RANGES, SIZE.slot_bytes, blocks) for blocks in self.blocks)
        self.count = self.sender.prepare_pack("p", self.sent)

    def move(self, chunk: int, slot: Slot) -> int:
        """One chunk through slot `slot` of both rings; the bytes that arrive."""
        length = self.sender.pack("p", self.sent, chunk, slot)
        source, target = (view(ring.address_of(slot), length) for ring in self.rings)
        target[:] = source
        return self.receiver.unpack("c", self.received, chunk, slot, length)


def view(address: int, length: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))


@pytest.fixture
def bench() -> Iterator[Bench]:
    one = Bench()
    yield one
    for ring in one.rings:
        ring.close()


def test_all_chunks_make_the_whole_pull(bench: Bench) -> None:
    bench.producer.fill(bench.blocks[0], RANGES)
    bench.consumer.memory[:] = 0xAB
    assert bench.count > 2
    moved = sum(bench.move(chunk, Slot(chunk % 2)) for chunk in reversed(range(bench.count)))
    assert moved == 10 * 2 * 2 * 2 * 4 * 2
    expected = np.full_like(bench.consumer.memory, 0xAB)
    bench.consumer.fill(bench.blocks[1], RANGES, expected)
    assert np.array_equal(bench.consumer.memory, expected)


def test_a_chunk_of_another_length_is_not_unpacked(bench: Bench) -> None:
    length = bench.sender.pack("p", bench.sent, 0, Slot(0))
    bench.consumer.memory[:] = 0xAB
    with pytest.raises(PlanError, match=rf"chunk 0: the producer packed {length - 1} bytes, expected {length}"):
        bench.receiver.unpack("c", bench.received, 0, Slot(0), length - 1)
    assert (bench.consumer.memory == 0xAB).all()


@pytest.mark.parametrize("chunk", [-1, 1000])
def test_there_is_no_chunk_outside(bench: Bench, chunk: int) -> None:
    with pytest.raises(PlanError, match=f"chunk {chunk} of a pull of {bench.count}"):
        bench.sender.pack("p", bench.sent, chunk, Slot(0))


def test_a_null_page_is_refused(bench: Bench) -> None:
    pull = StagedPull(bench.sent.plan, RANGES, SIZE.slot_bytes, (np.array([2, 0, 7]), np.array([1])))
    with pytest.raises(PlanError, match="null page"):
        bench.sender.pack("p", pull, 0, Slot(0))


def test_a_key_that_is_used_again_is_made_anew(bench: Bench) -> None:
    bench.producer.fill(bench.blocks[0], RANGES)
    bench.sender.pack("p", bench.sent, 0, Slot(0))
    first = view(bench.rings[0].address_of(0), SIZE.slot_bytes).copy()
    other = StagedPull(bench.sent.plan, RANGES, SIZE.slot_bytes, (np.array([1, 3, 4]), np.array([1])))
    bench.sender.pack("p", other, 0, Slot(0))
    assert not np.array_equal(view(bench.rings[0].address_of(0), SIZE.slot_bytes), first)


def test_the_tables_of_a_pull_are_made_once_however_many_ask(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def slow(*args: Any) -> Chunks:
        made.append(args)
        time.sleep(0.02)
        return cut_chunks(*args)

    monkeypatch.setattr(packer, "cut_chunks", slow)
    bench.sender.prepare_pack("p", bench.sent)
    made.clear()
    threads = [threading.Thread(target=bench.sender.prepare_pack, args=("q", bench.sent)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bench.sender.pack("p", bench.sent, 0, Slot(0))
    assert len(made) == 1


def test_tables_that_could_not_be_made_are_made_when_they_can(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(packer, "cut_chunks", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            bench.sender.prepare_pack("q", bench.sent)
    assert bench.sender.prepare_pack("q", bench.sent) == bench.count


def test_kept_tables_are_bounded_and_those_in_use_stay(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def counted(*args: Any) -> Chunks:
        made.append(args)
        return cut_chunks(*args)

    monkeypatch.setattr(packer, "cut_chunks", counted)
    monkeypatch.setattr(packer, "_MOST_BYTES", 100_000)
    for number in range(200):
        bench.sender.prepare_pack(number, bench.sent)
        bench.sender.prepare_pack("in use", bench.sent)
    assert len(made) == 201
    assert len(bench.sender._kept._known) < 30
    assert bench.sender._kept._size_bytes <= 100_000


def test_what_kept_tables_are_said_to_take_is_near_the_truth() -> None:
    like = Dense(heads=8, layers=40, tokens=16, head_size=128, item=2, blocks=4_200)
    producer, consumer = like.table(), replace(like, tp=2, base=DST, layout="BLHNC").table()
    plan = planned(consumer, {Rank(): producer})[Rank()]
    sender = Packer(producer, host_ring(SIZE), host_executor(), null_block=0)
    blocks = (np.random.default_rng(1).permutation(4_199)[:4_096] + 1,)
    pull = StagedPull(plan, (TokenRange(0, 65_536),), 8 << 20, blocks)
    sender.prepare_pack("warm", pull)  # templates are the plan's
    tracemalloc.start()
    sender.prepare_pack("p", pull)
    sender._kept._known["p"].tables.table(0)  # type: ignore[union-attr]
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    sender.ring.close()
    assert 0.5 < sender._kept._known["p"].size_bytes / taken < 2


def test_what_lies_in_a_slot_is_part_of_the_protocol() -> None:
    """If this fails, two versions of this package would hand over wrong bytes: raise `PROTOCOL_VERSION`."""
    layers = [Layer("a", units=4, channels=4), Layer("b", units=4, channels=4), Layer("c", "latent", channels=8)]
    specs = SideSpec(block_size=4, num_blocks=8), SideSpec(tp=2, block_size=6, kernel_block_size=3, layout="BHLNC")
    memories = [build_rank(spec, layers, 2, Rank(), Arena(1 << 16)) for spec in specs]
    plan = plan_pulls(memories[1].table, {Rank(): memories[0].table})[Rank()]
    ring = host_ring(SIZE)
    sender = Packer(memories[0].table, ring, host_executor(), null_block=0)
    ranges = (TokenRange(3, 17), NOTHING)
    blocks = (np.array([2, 5, 7, 1, 4]), np.array([1]))
    memories[0].fill(blocks, (TokenRange(0, 17), NOTHING))
    pull = StagedPull(plan, ranges, SIZE.slot_bytes, blocks)
    packed = hashlib.sha256()
    for chunk in range(sender.prepare_pack("p", pull)):
        length = sender.pack("p", pull, chunk, Slot(0))
        packed.update(length.to_bytes(4, "little") + view(ring.address_of(0), length).tobytes())
    ring.close()
    assert packed.hexdigest() == "d2eddc2a2d00f194fe4a8203a8cabd6d0e32ec3e62b272edefd8517cef106038"


def test_pulls_that_cannot_be_packed_are_not_kept(bench: Bench) -> None:
    """They weigh nothing, so the bound on what is kept would never let go of them."""
    for number in range(3):
        blocks = (np.array([2, 0, 7]), np.array([1]))
        with pytest.raises(PlanError, match="null page"):
            bench.sender.prepare_pack(f"p{number}", StagedPull(bench.sent.plan, RANGES, SIZE.slot_bytes, blocks))
        assert bench.sender.plan_of(f"p{number}") is None
