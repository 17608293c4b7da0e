"""Hand-overs through a `LinkedPair`: engines of any geometry in oracle memory, and what must have arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mooncake_hetero_tp.io.transfer import TransferEngine
from mooncake_hetero_tp.testing import LinkedPair, Load
from mooncake_hetero_tp.types import Rank, TokenRange, TransferId
from tests.oracle_memory import Arena, Ints, Layer, RankMemory, SideSpec, build_engine

LAYERS = tuple(Layer(f"model.layers.{number}", units=4, channels=8) for number in range(3))
PRODUCER = SideSpec(tp=1, block_size=4, num_blocks=64)
CONSUMER = SideSpec(tp=2, block_size=8, kernel_block_size=8, num_blocks=32, layout="BLHNC")
SENTINEL = 0xAB
STATE_UNUSED = TokenRange(0, 0)


class Handovers:
    """A linked pair over oracle memory, and its loads."""

    def __init__(
        self,
        make_engine: Callable[[bool], TransferEngine],
        *,
        producer: SideSpec = PRODUCER,
        consumer: SideSpec = CONSUMER,
        layers: Sequence[Layer] = LAYERS,
        item_bytes: int = 2,
        **options: Any,
    ) -> None:
        self._specs = (producer, consumer)
        self._next = [1, 1]
        size = 1 << 20
        self.producers = build_engine(producer, layers, item_bytes, Arena(size))
        self.consumers = build_engine(consumer, layers, item_bytes, Arena(size))
        noise = np.random.default_rng(0)
        for memory in self.producers.values():
            memory.memory[:] = noise.integers(0, 256, memory.memory.size, np.uint8)
        for memory in self.consumers.values():
            memory.memory[:] = SENTINEL
        self.pair = LinkedPair(_tables(self.producers), _tables(self.consumers), make_engine, **options)

    def load(self, name: str, tokens: int, *, skip: int = 0) -> Load:
        """A load of tokens `[skip, tokens)` in blocks of its own; the producers hold the oracle's values."""
        blocks = [self._take(side, tokens) for side in (0, 1)]
        ranges = (TokenRange(skip, tokens), STATE_UNUSED)
        for memory in self.producers.values():
            memory.fill(blocks[0], [TokenRange(0, tokens), STATE_UNUSED])
        return Load(
            transfer_id=TransferId(name),
            computed_tokens=tokens,
            producer_blocks=tuple(blocks[0]),
            consumer_blocks=tuple(blocks[1]),
            ranges=ranges,
        )

    def _take(self, side: int, tokens: int) -> list[Ints]:
        count = -(-tokens // self._specs[side].block_size)
        first = self._next[side]
        self._next[side] = first + count
        return [np.arange(first + count - 1, first - 1, -1), np.array([1])]

    def wrong_bytes(self, *loads: Load) -> int:
        """Bytes of all consumers that are neither the loads' values, nor zero tails, nor untouched."""
        wrong = 0
        for memory in self.consumers.values():
            expected = np.full_like(memory.memory, SENTINEL)
            for load in loads:
                self._expect(memory, load, expected)
            wrong += int((memory.memory != expected).sum())
        return wrong

    def _expect(self, memory: RankMemory, load: Load, expected: Any) -> None:
        blocks, tokens = [np.asarray(ids, np.int64) for ids in load.consumer_blocks], load.ranges[0]
        size = self._specs[1].block_size
        padded = TokenRange(tokens.end, -(-tokens.end // size) * size)
        marks = [np.full_like(expected, value) for value in (0, 1)]
        for mark in marks:
            memory.fill(blocks, [padded, STATE_UNUSED], mark)
        expected[marks[0] == marks[1]] = 0
        memory.fill(blocks, [tokens, STATE_UNUSED], expected)


def _tables(memories: dict[Rank, RankMemory]) -> dict[Rank, Any]:
    return {rank: memory.table for rank, memory in memories.items()}
