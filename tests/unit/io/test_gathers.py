"""Gathers in worker threads: outcomes, good and bad."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mooncake_hetero_tp.core.chunks import cut_chunks
from mooncake_hetero_tp.core.cuts import pair_cuts
from mooncake_hetero_tp.core.effects import Gather, GatherId, GatherOutcome
from mooncake_hetero_tp.core.plan import plan_pulls
from mooncake_hetero_tp.core.slots import Slot
from mooncake_hetero_tp.io import gathers, packer
from mooncake_hetero_tp.io.gathers import Gathers
from mooncake_hetero_tp.io.packer import Packer
from mooncake_hetero_tp.io.pool import WorkerPool
from mooncake_hetero_tp.io.staging import RingSize, host_ring
from mooncake_hetero_tp.native.executor import host_executor
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Rank, RequestId, TokenRange
from tests.oracle_memory import Arena, Layer, SideSpec, build_rank

LAYERS = [Layer("a", units=2, channels=4)]
RANGES = (TokenRange(0, 6), TokenRange(0, 0))
SIZE = RingSize(slot_bytes=4096, slots=2)


class Bench:
    """A producer rank's gathers for one consumer rank."""

    def __init__(self) -> None:
        self.producer = build_rank(SideSpec(block_size=4, num_blocks=6), LAYERS, 2, Rank(), Arena(1 << 16))
        self.consumer = build_rank(SideSpec(tp=2, block_size=8, num_blocks=6), LAYERS, 2, Rank(), Arena(1 << 16))
        self.plan = plan_pulls(self.consumer.table, {Rank(): self.producer.table})[Rank()]
        self.ring = host_ring(SIZE)
        self.pool = WorkerPool("mht-test", 2)
        self.outcomes: dict[GatherId, GatherOutcome] = {}
        self.changed = threading.Condition()
        sender = Packer(self.producer.table, self.ring, host_executor(), null_block=0)
        self.gathers = Gathers(sender, self.pool, self._done)

    def _done(self, gather_id: GatherId, outcome: GatherOutcome) -> None:
        with self.changed:
            self.outcomes[gather_id] = outcome
            self.changed.notify_all()

    def gather(self, number: int = 1, **changes: Any) -> GatherOutcome:
        fields: dict[str, Any] = {
            "gather_id": GatherId(number),
            "request_id": RequestId("r"),
            "consumer": Identity(EngineId("d"), Incarnation("aa"), Rank()),
            "consumer_table": self.consumer.table,
            "cuts": pair_cuts(self.plan),
            "ranges": RANGES,
            "chunk": 0,
            "chunk_bytes": SIZE.slot_bytes,
            "blocks": (np.array([2, 5]), np.array([1])),
            "slot": Slot(1),
        }
        self.gathers.start(Gather(**(fields | changes)))
        with self.changed:
            assert self.changed.wait_for(lambda: GatherId(number) in self.outcomes, 30)
        return self.outcomes[GatherId(number)]


@pytest.fixture
def bench() -> Iterator[Bench]:
    one = Bench()
    yield one
    assert one.pool.close(5)
    one.ring.close()


def test_a_chunk_is_packed_into_its_slot(bench: Bench) -> None:
    outcome = bench.gather()
    assert outcome.error is None
    assert outcome.length_bytes >= 6 * 2 * 4 * 2
    assert outcome.gather_us >= 0


def test_tables_of_a_pull_last_although_its_plan_had_to_make_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer rank may serve more consumer ranks than plans are kept of."""
    made: list[object] = []

    def counted(*args: Any) -> Any:
        made.append(args)
        return cut_chunks(*args)

    monkeypatch.setattr(packer, "cut_chunks", counted)
    same = {"blocks": (np.array([2, 5]), np.array([1]))}
    for number in range(1, 4):
        assert bench.gather(number, **same).error is None
        gathers._known_plan.cache_clear()
    assert len(made) == 1
    assert bench.gather(4, **same, cuts=()).error is not None


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"chunk": 7}, "chunk 7 of a pull of 1"),
        ({"blocks": (np.array([2, 0]), np.array([1]))}, "null page"),
        ({"blocks": (np.array([2, 99]), np.array([1]))}, "outside the cache"),
        ({"slot": Slot(5)}, "slot 5 of a staging ring of 2"),
        ({"chunk_bytes": 1}, "slots of 1 bytes"),
    ],
)
def test_what_cannot_be_packed_says_why(bench: Bench, changes: dict[str, Any], words: str) -> None:
    outcome = bench.gather(**changes)
    assert words in (outcome.error or "")


def test_cuts_outside_the_tables_are_the_consumers_fault(bench: Bench) -> None:
    cut = pair_cuts(bench.plan)[0]
    wrong = type(cut)(99, cut.producer_region, cut.global_start, cut.count)
    assert "expected places in tables" in (bench.gather(cuts=(wrong,)).error or "")


def test_a_bug_is_an_outcome_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Packer, "pack", lambda *_: 1 // 0)
    assert "ZeroDivisionError" in (bench.gather().error or "")
    assert "failed unexpectedly" in caplog.text
