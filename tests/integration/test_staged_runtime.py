"""Random hand-overs through whole runtimes over loopback: unlike geometries and rings, faults, clients that go.

Real threads, ZMQ and HTTP. Whatever happens: a load that is reported as good has the oracle's values, nothing outside
the pages of the others has changed, every load is reported, all blocks are freed, and every slot comes home.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from mooncake_hetero_tp.core.consumer import ConsumerConfig
from mooncake_hetero_tp.core.cost import Mode
from mooncake_hetero_tp.core.producer import ProducerConfig
from mooncake_hetero_tp.core.slots import SlotTable
from mooncake_hetero_tp.io.runtime import StepWork
from mooncake_hetero_tp.io.staging import RingSize
from mooncake_hetero_tp.testing import Load, LoopbackEngine, LoopbackFabric
from mooncake_hetero_tp.types import TokenRange
from tests.handovers import SENTINEL, STATE_UNUSED, Handovers
from tests.integration.test_failures import until
from tests.oracle_memory import PAGE_ENCODINGS, VLLM_LAYOUTS, Bytes, Layer, RankMemory, SideSpec

pytestmark = pytest.mark.usefixtures("leaves_nothing")

SEEDS = 24
MOST_TOKENS = 100
LAYERS = (Layer("a", units=4, channels=8), Layer("b", units=4, channels=8), Layer("c", "latent", channels=8))


def draw_side(rng: random.Random, tp: int) -> SideSpec:
    kernel = rng.choice((1, 2, 4, 8))
    block = kernel * rng.choice((1, 2, 3))
    encoding = rng.choice(("packed", "packed", *PAGE_ENCODINGS))
    blocks = 2 + 8 * -(-MOST_TOKENS // block)
    return SideSpec(tp, 1, rng.choice(VLLM_LAYOUTS), encoding, block, kernel, num_blocks=blocks)


def draw_ring(rng: random.Random) -> RingSize:
    return RingSize(rng.choice((256, 512, 1024, 4096)), rng.randint(1, 4))


@dataclass
class Trial:
    """One drawn pair of engines, and what became of its loads."""

    seed: int
    faulty: bool
    good: list[Load] = field(default_factory=list)
    """Reported as good, and still wanted."""
    others: list[Load] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.reading: list[LoopbackEngine] = []
        fabric = LoopbackFabric()

        def make(serves: bool) -> LoopbackEngine:
            engine = LoopbackEngine(fabric)
            if not serves:
                self.reading.append(engine)
            return engine

        sizes = rng.choice(((1, 2), (2, 1), (2, 4), (4, 2), (1, 1)))
        producer, consumer = (draw_side(rng, tp) for tp in sizes)
        self.handovers = Handovers(
            make,
            producer=producer,
            consumer=consumer,
            layers=LAYERS,
            producer_config=ProducerConfig(lease_s=rng.choice((0.5, 5.0))),
            consumer_config=ConsumerConfig(
                resend_s=0.02, resend_max_s=0.1, silence_s=5.0, heartbeat_s=0.3, staging_window=rng.randint(1, 4)
            ),
            transfer_mode=rng.choice((Mode.STAGED, Mode.STAGED, Mode.AUTO)),
            staging=draw_ring(rng),
            num_workers=rng.choice((2, 4, 8)),
            close_timeout_s=0.2,
        )
        self.pair = self.handovers.pair
        self.pair._producer_staging = draw_ring(rng)

    def run(self) -> None:
        with self.pair, self._faults():
            loads = [self._begin(number) for number in range(self.rng.randint(2, 6))]
            for load, wanted in loads:
                well = self.pair.wait_loaded(load)
                (self.good if well and wanted else self.others).append(load)
                self.pair.release(load)
            for load, _ in loads:
                self.pair.wait_freed(load)
            until(lambda: all(slots.all_home for slots in self._slots()))

    def _begin(self, number: int) -> tuple[Load, bool]:
        """A load whose two sides begin in any order, and whether its client stays."""
        rng = self.rng
        tokens = rng.randint(1, MOST_TOKENS)
        load = self.handovers.load(f"x{number}", tokens, skip=rng.randrange(tokens) if rng.random() < 0.3 else 0)
        for begin in rng.sample((self.pair.keep, self.pair.pull), 2):
            begin(load)
        if not self.faulty or rng.random() < 0.8:
            return load, True
        threading.Event().wait(0.03 * rng.random())
        for runtime in self.pair.consumers.values():
            runtime.submit(StepWork(cancelled=[load.consumer_request]))
        return load, False

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Descriptors in any order; in faulty trials also calls that fail, linger, and go on writing when they failed."""
        over, rng = threading.Event(), random.Random(self.seed)

        def trouble() -> None:
            while not over.wait(0.01 * rng.random()):
                for engine in list(self.reading):
                    engine.reorder(rng.randrange(100))
                    engine.write_leftovers()
                    if self.faulty:
                        engine.delay(rng.choice((0, 0, 0.02)))
                        if rng.random() < 0.04:
                            engine.fail(1, keep_writing=rng.random() < 0.5)

        thread = threading.Thread(target=trouble)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _slots(self) -> list[SlotTable[Any]]:
        drivers: list[Any] = [
            runtime._driver for runtime in (*self.pair.consumers.values(), *self.pair.producers.values())
        ]
        return [
            driver._consumer._reader.stagings._slots if driver._consumer else driver._producer._shelf._slots
            for driver in drivers
        ]

    def wrong_bytes(self) -> int:
        return sum(self._wrong(memory) for memory in self.handovers.consumers.values())

    def _wrong(self, memory: RankMemory) -> int:
        expected = np.full_like(memory.memory, SENTINEL)
        for load in self.good:
            self.handovers._expect(memory, load, expected)
        wrong = memory.memory != expected
        for load in self.others:
            wrong &= ~self._pages(memory, load)
        return int(wrong.sum())

    def _pages(self, memory: RankMemory, load: Load) -> Any:
        """Which bytes are in its pages."""
        size = self.handovers._specs[1].block_size
        whole = TokenRange(0, -(-load.ranges[0].end // size) * size)
        marks: list[Bytes] = [np.full_like(memory.memory, value) for value in (0, 1)]
        for mark in marks:
            memory.fill([np.asarray(ids, np.int64) for ids in load.consumer_blocks], [whole, STATE_UNUSED], mark)
        return marks[0] == marks[1]


@pytest.mark.parametrize("faulty", [False, True], ids=["well", "faulty"])
def test_random_hand_overs(*, faulty: bool) -> None:
    good = chunks = 0
    for seed in range(SEEDS):
        trial = Trial(seed, faulty)
        trial.run()
        assert trial.wrong_bytes() == 0, f"seed {seed}"
        assert faulty or not trial.others, f"seed {seed}"
        good += len(trial.good)
        chunks += sum(runtime.stats().chunks for runtime in trial.pair.consumers.values())
    assert good > SEEDS
    assert chunks > 10 * SEEDS
