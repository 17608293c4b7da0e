"""Hand-overs under the value oracle: drawn, planned, moved and compared byte for byte.

Producer shards of any TP, PP, layout, encoding and block size are built in real memory (`oracle_memory.py`);
the plan under test moves bytes; each consumer shard must then equal the hash for the range, and its former
random bytes everywhere else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from mooncake_hetero_tp.core.binding import Descriptors, bind
from mooncake_hetero_tp.core.plan import PairPlan, plan_pulls, prove
from mooncake_hetero_tp.core.regions import Buffer
from mooncake_hetero_tp.core.tables import validate_table
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.oracle_memory import (
    PAGE_ENCODINGS,
    VLLM_LAYOUTS,
    Arena,
    Bytes,
    Ints,
    Layer,
    RankMemory,
    SideSpec,
    build_engine,
    build_rank,
)


@dataclass(frozen=True)
class Case:
    """One hand-over: a model, two engines, a token range."""

    producer: SideSpec
    consumer: SideSpec
    layers: tuple[Layer, ...]
    item_bytes: int
    tokens: TokenRange
    seed: int = 0

    @property
    def ranges(self) -> list[TokenRange]:
        return [self.tokens] * 2


class HandOver(Protocol):
    """What a pull must know of its case."""

    @property
    def ranges(self) -> list[TokenRange]:
        """What the consumer's groups want."""


# --- moving bytes and comparing ------------------------------------------------------------------

Reader: TypeAlias = Callable[[Descriptors], None]
"""Carries descriptors out: reads `length` bytes of the producer's `src` into our `dst`."""


def loopback_reader(source: Arena, target: Arena) -> Reader:
    """Copies between two arenas of this process; an address outside of them is an IndexError."""

    def read(descriptors: Descriptors) -> None:
        within = np.arange(descriptors.bytes) - np.repeat(
            np.cumsum(descriptors.length) - descriptors.length, descriptors.length
        )
        src = np.repeat(descriptors.src - source.address, descriptors.length) + within
        dst = np.repeat(descriptors.dst - target.address, descriptors.length) + within
        if src.size and min(int(src.min()), int(dst.min())) < 0:
            raise IndexError("a descriptor begins before its arena")
        target.memory[dst] = source.memory[src]

    return read


@dataclass
class Tally:
    """What cases amounted to, so that a test can say that it tested something."""

    cases: int = 0
    ranks: int = 0
    descriptors: int = 0
    bytes: int = 0


def draw_blocks(rng: random.Random, spec: SideSpec, end: int) -> list[Ints]:
    """Block ids per group for tokens `[0, end)`: random, rising or falling; id 0 is the null block."""
    count = -(-end // spec.block_size)
    lists = []
    for _ in range(2):
        ids = rng.sample(range(1, spec.num_blocks), count)
        lists.append(np.array(rng.choice([ids, sorted(ids), sorted(ids, reverse=True)]), np.int64))
    return lists


@dataclass(frozen=True)
class Pull:
    """One consumer rank's part of a case, with blocks per group."""

    case: HandOver
    consumer: RankMemory
    consumer_blocks: list[Ints]
    producers: Mapping[Rank, RankMemory]
    producer_blocks: list[Ints]

    def plans(self) -> dict[Rank, PairPlan]:
        """Planned and proven."""
        tables = {rank: memory.table for rank, memory in self.producers.items()}
        for table in (self.consumer.table, *tables.values()):
            validate_table(table)
        plans = plan_pulls(self.consumer.table, tables, prefer=self.consumer.rank.tp)
        prove(self.consumer.table, plans)
        return plans

    def run(self, plans: dict[Rank, PairPlan], read: Reader, tally: Tally) -> None:
        """Moves the bytes and compares all of the consumer's memory."""
        expected = self.expected()
        for plan in plans.values():
            descriptors = self.bind(plan)
            assert inside_one_buffer(descriptors.src, descriptors.length, plan.producer.buffers)
            assert inside_one_buffer(descriptors.dst, descriptors.length, plan.consumer.buffers)
            read(descriptors)
            tally.descriptors += descriptors.count
            tally.bytes += descriptors.bytes
        tally.ranks += 1
        self.compare(expected)

    @property
    def ranges(self) -> list[TokenRange]:
        return self.case.ranges

    def bind(self, plan: PairPlan) -> Descriptors:
        return bind(plan, self.ranges, self.producer_blocks, self.consumer_blocks)

    def expected(self) -> Bytes:
        """What the consumer's memory must hold after the pull; to be taken before it."""
        memory = self.consumer.memory.copy()
        self.consumer.fill(self.consumer_blocks, self.ranges, memory)
        return memory

    def compare(self, expected: Bytes) -> None:
        """Raises AssertionError unless the consumer's memory is `expected`."""
        wrong = np.flatnonzero(self.consumer.memory != expected)
        if wrong.size:
            raise AssertionError(
                f"{wrong.size} bytes differ, the first at {int(wrong[0])}, rank {self.consumer.rank} of {self.case}"
            )


def inside_one_buffer(starts: Ints, length: Ints, buffers: Sequence[Buffer]) -> bool:
    """Whether each interval lies in one registered buffer, as a transfer engine demands."""
    first = np.array([buffer.address for buffer in buffers])
    end = np.array([buffer.end for buffer in buffers])
    place = np.searchsorted(first, starts, side="right") - 1
    return bool((place >= 0).all() and (starts + length <= end[place]).all())


def build_producers(case: Case, arena: Arena) -> tuple[dict[Rank, RankMemory], list[Ints]]:
    """The producer's ranks, noise everywhere but the oracle in tokens `[0, end)`; and its block ids."""
    rng, noise = random.Random(case.seed), np.random.default_rng(case.seed)
    arena.reset()
    producers = build_engine(case.producer, case.layers, case.item_bytes, arena)
    blocks = draw_blocks(rng, case.producer, case.tokens.end)
    for memory in producers.values():
        memory.memory[:] = noise.integers(0, 256, memory.memory.size, np.uint8)
        memory.fill(blocks, [TokenRange(0, case.tokens.end)] * 2)
    return producers, blocks


def build_consumer(case: Case, rank: Rank, arena: Arena) -> tuple[RankMemory, list[Ints]]:
    """One consumer rank full of noise, and its block ids."""
    seed = (case.seed, rank.pp, rank.tp)
    rng, noise = random.Random(repr(seed)), np.random.default_rng(seed)
    arena.reset()
    consumer = build_rank(case.consumer, case.layers, case.item_bytes, rank, arena)
    consumer.memory[:] = noise.integers(0, 256, consumer.memory.size, np.uint8)
    return consumer, draw_blocks(rng, case.consumer, case.tokens.end)


def run_case(case: Case, arenas: tuple[Arena, Arena], read: Reader, most_ranks: int = 2) -> Tally:
    """Plans, proves, binds and moves for up to `most_ranks` consumer ranks; compares every byte of them.

    Raises:
        AssertionError: a byte differs from the oracle, or a byte outside the range changed.
    """
    return run_pulls(build_pulls(case, arenas, most_ranks), read)


def run_pulls(pulls: Iterable[Pull], read: Reader) -> Tally:
    """The same for pulls that are built."""
    tally = Tally(cases=1)
    for pull in pulls:
        pull.run(pull.plans(), read, tally)
    return tally


def build_pulls(case: Case, arenas: tuple[Arena, Arena], most_ranks: int) -> Iterator[Pull]:
    """Up to `most_ranks` of the consumer's ranks, in the same memory one after the other."""
    producers, producer_blocks = build_producers(case, arenas[0])
    ranks = [Rank(0, pp, tp) for pp in range(case.consumer.pp) for tp in range(case.consumer.tp)]
    for rank in random.Random(case.seed).sample(ranks, min(most_ranks, len(ranks))):
        consumer, blocks = build_consumer(case, rank, arenas[1])
        yield Pull(case, consumer, blocks, producers, producer_blocks)


# --- drawing cases -------------------------------------------------------------------------------

TP_SIZES = (1, 2, 3, 4, 6, 8)
HEADS = (1, 2, 4, 6, 8)
BLOCKS = (4, 8, 12, 16)


def allowed(heads: int, tp: int) -> bool:
    """As vLLM rules: TP divides the heads or the heads divide TP."""
    return heads % tp == 0 or tp % heads == 0


def draw_side(rng: random.Random, heads: int, end: int) -> SideSpec:
    block = rng.choice(BLOCKS)
    encoding = rng.choice(("packed", "packed", *PAGE_ENCODINGS))
    layout = rng.choice(VLLM_LAYOUTS if encoding == "packed" else ("LBHNC", "BLHNC"))
    if encoding == "planes":
        layout = "LBHNC"
    kernels = [size for size in (4, 8, 12, 16) if block % size == 0 and layout.startswith("LB")] or [block]
    paddable = layout[:2] in ("LB", "BL") and encoding != "planes"
    return SideSpec(
        tp=rng.choice([tp for tp in TP_SIZES if allowed(heads, tp)]),
        pp=rng.choice((1, 1, 1, 2)),
        layout=layout,
        encoding=encoding,
        block_size=block,
        kernel_block_size=rng.choice([block, *kernels]),
        pad_bytes=rng.choice((0, 0, 32)) if paddable else 0,
        num_blocks=-(-end // block) + rng.randint(2, 5),
        buffer_per_layer=layout.startswith("L") and rng.random() < 0.3,
        state_rows_first=rng.random() < 0.5,
    )


def draw_range(rng: random.Random, consumer_block: int, end: int) -> TokenRange:
    """Nothing, one or two consumer blocks skipped, or any number of tokens."""
    skips = [blocks * consumer_block for blocks in (0, 1, 2) if blocks * consumer_block < end]
    return TokenRange(rng.choice([*skips, rng.randrange(end)]), end)


def draw_case(seed: int) -> Case:
    """A random legal hand-over; the same seed gives the same case."""
    rng = random.Random(seed)
    heads = rng.choice(HEADS)
    end = rng.choice((1, rng.randint(1, 8), rng.randint(1, 48), rng.choice(BLOCKS) * rng.randint(1, 3)))
    consumer = draw_side(rng, heads, end)
    channels = rng.choice((2, 4))
    layers = [Layer(f"layers.{i}.attn", "attention", heads, channels) for i in range(rng.randint(1, 3))]
    if rng.random() < 0.25:
        layers.append(Layer("layers.9.mla", "latent", 1, channels))
    if rng.random() < 0.25:
        layers.append(Layer("layers.10.gdn", "state", heads, channels))
    rng.shuffle(layers)
    return Case(
        producer=draw_side(rng, heads, end),
        consumer=consumer,
        layers=tuple(layers),
        item_bytes=rng.choice((1, 2, 4)),
        tokens=draw_range(rng, consumer.block_size, end),
        seed=seed,
    )
