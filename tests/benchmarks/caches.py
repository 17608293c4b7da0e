"""KV caches in real memory for the rows that move bytes between two processes: shapes, contents, and the check.

Where an element lies comes from numpy's own strides, so that the check shares no arithmetic with the package.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.types import TokenRange
from tests.oracle_memory import Bytes, Ints
from tests.tables import Dense

LOGICAL = "LBHNC"
SEED = 20_261_201
MIB = 2**20


@dataclass(frozen=True)
class Shape:
    """TP1 -> TP2, bf16, block 16; a pull of `blocks` blocks in random order. `like` is the consumer without memory."""

    name: str
    like: Dense
    producer_layout: str
    blocks: int

    @property
    def producer(self) -> Dense:
        return replace(self.like, tp=1, rank=0, layout=self.producer_layout)

    @property
    def tokens(self) -> TokenRange:
        return TokenRange(0, self.blocks * self.like.tokens)

    def open(self, side: str) -> Cache:
        """That side's memory."""
        return Cache.of(self.producer if side == "producer" else self.like)

    def kept(self, blocks: int) -> tuple[tuple[Ints, ...], int]:
        """The producer's first blocks, per group, and the tokens in them."""
        return (block_ids(self, "producer")[:blocks],), blocks * self.like.tokens

    def wanted(self, ids: Ints) -> tuple[tuple[TokenRange, ...], tuple[Ints, ...]]:
        """Ranges and the consumer's blocks, per group, of a pull into these."""
        return (TokenRange(0, ids.size * self.like.tokens),), (ids,)

    @property
    def pull_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers of the consumer."""
        return self.like.layers * self._unit_bytes * self._units

    @property
    def _units(self) -> int:
        return self.like.heads // self.like.tp

    @property
    def _unit_bytes(self) -> int:
        return self.like.tokens * 2 * self.like.head_size * self.like.item

    @property
    def piece_bytes(self) -> int:
        """The longest run that is contiguous on both sides, but for neighbours that meet by chance."""
        if self.producer_layout.index("N") < self.producer_layout.index("H"):
            return 2 * self.like.head_size * self.like.item
        page = self._units * self._unit_bytes
        return page * self.like.layers if self.producer_layout.endswith("HLNC") else page

    @property
    def sizes(self) -> dict[str, int | str]:
        """What a row says of it."""
        return {
            "piece_bytes": self.piece_bytes,
            "pull_bytes": self.pull_bytes,
            "pieces": self.pull_bytes // self.piece_bytes,
            "tp": "1 -> 2",
            "layout": f"{self.producer_layout} -> {self.like.layout}",
            "layers": self.like.layers,
            "kv_heads": self.like.heads,
            "head_size": self.like.head_size,
            "block_size": self.like.tokens,
        }


def shape(
    name: str, heads: int, head_size: int, layers: int, pull_mib: int, layouts: tuple[str, str] = (LOGICAL, LOGICAL)
) -> Shape:
    """A pull of about `pull_mib`; block 0 is the null block of both sides."""
    like = Dense(heads, tp=2, layers=layers, layout=layouts[1], tokens=16, head_size=head_size, item=2)
    blocks = pull_mib * MIB // Shape(name, like, layouts[0], 1).block_bytes
    return Shape(name, replace(like, blocks=blocks + 1), layouts[0], blocks)


TOKEN_MAJOR = "LBNHC"
SHAPES: dict[str, Shape] = {
    made.name: made
    for made in (
        shape("256_b", 8, 64, 16, 64, (TOKEN_MAJOR, LOGICAL)),
        shape("4_kib", 2, 64, 32, 64),
        shape("16_kib", 4, 128, 32, 64),
        shape("32_kib", 8, 128, 32, 64),
        shape("64_kib", 16, 128, 32, 64),
        shape("1_6_mb", 8, 128, 50, 64, ("BHLNC", "BHLNC")),
    )
}
CROWD = shape("crowd", 2, 64, 32, 160)


def block_ids(shape: Shape, side: str) -> Ints:
    """One side's block of each page of the whole shape, in an order that both processes draw alike."""
    return 1 + np.random.default_rng([SEED, len(side)]).permutation(shape.blocks)


@dataclass(frozen=True)
class Cache:
    """One side's memory."""

    dense: Dense
    memory: Bytes

    @classmethod
    def of(cls, dense: Dense) -> Cache:
        """Touched, all ones."""
        size = dense.layers * dense.blocks * dense.heads // dense.tp * dense.tokens * 2 * dense.head_size * dense.item
        memory = np.ones(size, np.uint8)
        return cls(replace(dense, base=int(memory.ctypes.data)), memory)

    @property
    def address(self) -> int:
        return self.dense.base

    @cached_property
    def table(self) -> RankTable:
        return self.dense.table()

    def fill(self) -> None:
        """The same bytes in every process."""
        self.memory[:] = np.random.default_rng(SEED).integers(0, 256, self.memory.size, np.uint8)

    @property
    def logical(self) -> Bytes:
        """Bytes by layer, block, head, token, and place in the token's K and V of one head."""
        dense = self.dense
        counts = {
            "L": dense.layers,
            "B": dense.blocks,
            "H": dense.heads // dense.tp,
            "N": dense.tokens,
            "C": 2 * dense.head_size * dense.item,
        }
        held = self.memory.reshape([counts[dim] for dim in dense.layout])
        return held.transpose([dense.layout.index(dim) for dim in LOGICAL])


class Expected:
    """What the blocks of a consumer must hold."""

    def __init__(self, shape: Shape) -> None:
        source = Cache.of(shape.producer)
        source.fill()
        heads = slice(0, shape.like.heads // shape.like.tp)
        self._values = source.logical[:, block_ids(shape, "producer"), heads]

    def wrong_bytes(self, cache: Cache, targets: Ints) -> int:
        """Bytes that are not what a pull of the first pages into these blocks brings."""
        found = cache.logical[:, targets]
        return int((found != self._values[:, : targets.size]).sum())
