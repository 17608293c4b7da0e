"""A hybrid of linear attention and attention: how long planning takes, and how fast a pull is.

Planning stands beside that of a dense model of as many bytes, blocks and layers. A pull goes between two processes, as in
`staged.py`, and stands beside one descriptor of as many bytes without any protocol; both take turns.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from mooncake_hetero_tp.core.binding import Descriptors, bind
from mooncake_hetero_tp.core.cost import Mode
from mooncake_hetero_tp.core.plan import plan_pulls, prove
from mooncake_hetero_tp.core.regions import Buffer, RankTable
from mooncake_hetero_tp.io.engine import MooncakeEngine
from mooncake_hetero_tp.io.transfer import Deadline
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.benchmarks.bind import WrongBytes
from tests.benchmarks.consumer import Consumer
from tests.benchmarks.hybrids import (
    ATTENTION,
    BLOCK,
    GROUPS,
    HYBRID,
    STACKS,
    Hybrid,
    HybridCache,
    block_lists,
    blocks_needed,
    dense_like,
    ranges,
)
from tests.benchmarks.producer import HOST, LEASE_S, Producer, producer
from tests.benchmarks.rows import Report, Row, Sample, interleaved
from tests.benchmarks.staged import BASELINE_LIMITS, READ_WITHIN_S, RING
from tests.oracle_memory import Ints
from tests.tables import DST, SRC

TOKENS = 32_768
REPEATS = 41
ROUNDS, PULLS = 4, 5
PLAN_TARGET, PULL_TARGET = 2.0, 0.75
MODEL: dict[str, int | str] = {
    "layers": STACKS * GROUPS,
    "attention_layers": STACKS,
    "kv_heads": 2,
    "head_size": 256,
    "block_size": BLOCK,
    "tp": "1 -> 2",
}
DENSE = "a dense model of as many bytes, blocks and layers"
PLAN = Row(
    name="plan_hybrid",
    sizes={**MODEL, "tokens": TOKENS},
    unit="ms",
    baseline=DENSE,
    target=f"ratio <= {PLAN_TARGET}",
    note="plan and bind; planned afresh each time, though a plan serves all requests of a pair",
)
PROVEN = Row(
    name="plan_hybrid_proven",
    sizes={**MODEL, "tokens": TOKENS},
    unit="ms",
    baseline=DENSE,
    note="plan, prove and bind: all that is done for the first request of a pair",
)
PULL = Row(
    name="hybrid",
    sizes={**MODEL, "tokens": HYBRID.tokens, "pull_bytes": HYBRID.pull_bytes},
    unit="MB/s",
    baseline="one descriptor of as many bytes, no protocol",
    target=f"ratio >= {PULL_TARGET}",
)

_dice = random.Random(20_261_201)


def rows() -> list[Row]:
    """Everything that `measure` fills in."""
    return [PLAN, PROVEN, PULL]


class Planned(NamedTuple):
    """One request on two tables, block lists per group."""

    producer: RankTable
    consumer: RankTable
    tokens: list[TokenRange]
    blocks: tuple[list[Ints], list[Ints]]

    def arrays(self, *, proven: bool = False) -> Descriptors:
        """From two tables and block ids to the arrays of the engine call."""
        plans = plan_pulls(self.consumer, {Rank(): self.producer})
        if proven:
            prove(self.consumer, plans)
        return bind(plans[Rank()], self.tokens, *self.blocks)


def hybrid_request() -> Planned:
    blocks = blocks_needed(TOKENS)
    tables = Hybrid(1, 0, blocks, SRC).table(), Hybrid(2, 1, blocks, DST).table()
    lists = block_lists(TOKENS, blocks, 1), block_lists(TOKENS, blocks, 2)
    return Planned(*tables, ranges(TOKENS), lists)


def dense_request() -> Planned:
    sides = dense_like(TOKENS, 1, 0, SRC), dense_like(TOKENS, 2, 1, DST)
    lists = [block_lists(TOKENS, blocks_needed(TOKENS), seed)[ATTENTION:] for seed in (1, 2)]
    ids = [[1 + np.argsort(np.argsort(one[0]))] for one in lists]  # the same order, of a pool without states
    return Planned(sides[0].table(), sides[1].table(), [TokenRange(0, TOKENS)], (ids[0], ids[1]))


def measure(report: Report, *, quick: bool) -> None:
    """Fill in all rows.

    Raises:
        WrongBytes: a pull brought other bytes than the producer holds.
    """
    if report.wants([PLAN, PROVEN]):
        _measure_plans(report, 5 if quick else REPEATS)
    if report.wants([PULL]):
        _measure_pulls(report, rounds=1 if quick else ROUNDS)


def _measure_plans(report: Report, repeats: int) -> None:
    ours, theirs = hybrid_request(), dense_request()
    sizes = [request.arrays().bytes for request in (ours, theirs)]
    if abs(sizes[0] / sizes[1] - 1) > 0.01:
        raise WrongBytes(f"the models are not of one size: {sizes[0]} and {sizes[1]} bytes")
    times = interleaved({"ours": ours.arrays, "theirs": theirs.arrays}, repeats)
    report.add(PLAN.measured(times["ours"], times["theirs"], met=partial(_is_at_most, PLAN_TARGET)))
    proven = {"ours": partial(ours.arrays, proven=True), "theirs": partial(theirs.arrays, proven=True)}
    times = interleaved(proven, max(repeats // 4, 3))
    report.add(PROVEN.measured(times["ours"], times["theirs"]))


def _measure_pulls(report: Report, *, rounds: int) -> None:
    """Everything is started afresh for each round: over loopback a pair of threads stays fast or slow for seconds."""
    rates: dict[str, list[float]] = {"auto": [], "bulk": []}
    modes: list[str] = []
    for _ in range(rounds):
        with producer(HYBRID, RING) as served:
            cache = HYBRID.open("consumer")
            bulk = Bulk(cache, served)
            consumer = Consumer(HYBRID, cache, Mode.AUTO, RING, served)
            try:
                _take_turns(rates, {"auto": partial(_pull, consumer), "bulk": bulk.read}, cache)
                modes += [record.mode for record in consumer.records()]
            finally:
                consumer.close()
                bulk.close()
    samples = {name: Sample.of(values) for name, values in rates.items()}
    note = f"auto staged {modes.count(Mode.STAGED)} of {len(modes)} pulls"
    report.add(PULL.measured(samples["auto"], samples["bulk"], met=partial(_is_at_least, PULL_TARGET), note=note))


def _take_turns(rates: dict[str, list[float]], turns: dict[str, Callable[[], float]], cache: HybridCache) -> None:
    turns["bulk"]()
    cache.memory[:] = 0x5A
    turns["auto"]()
    if wrong := HYBRID.wrong_bytes(cache):
        raise WrongBytes(f"{HYBRID.name}: {wrong} bytes are wrong")
    order = list(turns.items())
    for _ in range(PULLS):
        _dice.shuffle(order)
        for name, turn in order:
            rates[name].append(HYBRID.pull_bytes / 1e6 / turn())


def _pull(consumer: Consumer) -> float:
    (seconds,) = consumer.pull([HYBRID.lists("consumer")[ATTENTION]])
    return seconds


class Bulk:
    """An engine of our own on the same memory, which reads one descriptor."""

    def __init__(self, cache: HybridCache, served: Producer) -> None:
        self._peer = served.started
        columns = (np.array([number], np.int64) for number in (self._peer.address, cache.address, HYBRID.pull_bytes))
        self._whole = Descriptors(*columns)
        self._engine = MooncakeEngine(HOST, lease_s=LEASE_S, protocol="tcp", serves=False, limits=BASELINE_LIMITS)
        self._engine.register([Buffer(cache.address, cache.memory.nbytes)])

    def read(self) -> float:
        """Seconds that it took."""
        began = time.perf_counter()
        self._engine.read(self._peer.session, self._whole, deadline=Deadline(time.monotonic() + READ_WITHIN_S))
        return time.perf_counter() - began

    def close(self) -> None:
        self._engine.close()


def _is_at_most(target: float, row: Row) -> bool | None:
    return None if row.ratio is None else row.ratio <= target


def _is_at_least(target: float, row: Row) -> bool | None:
    return None if row.ratio is None else row.ratio >= target
