"""A hybrid of linear attention and attention as vLLM lays it out, and a dense model of as many bytes and blocks.

60 layers of Qwen3.5's sizes, every fourth with attention (2 KV heads of 256), the others gated delta nets; bf16, states
in float32, TP 1 -> TP 2. Four KV cache groups of 15 layers lie over one another: layer i of each group has its pages in
the i-th of 15 stacks, and all groups draw their blocks from one pool. A page holds a state or the attention of one block,
whose length follows from that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from mooncake_hetero_tp.core.regions import STATE, Buffer, Group, RankTable, Region
from mooncake_hetero_tp.core.state_tensors import (
    ConvLayout,
    Slots,
    StateTensor,
    conv_tensor,
    head_tensor,
    local_shape,
    place,
    qkv_parts,
)
from mooncake_hetero_tp.types import TokenRange
from tests.oracle_memory import Bytes, Ints
from tests.tables import Dense, region

STACKS, GROUPS = 15, 4
ATTENTION = 3
"""The group of the attention layers; the others hold states."""
KV_HEADS, HEAD_SIZE, ITEM = 2, 256, 2
TENSORS: tuple[StateTensor, ...] = (
    conv_tensor(qkv_parts(16, 64, 128, 128), 3, ConvLayout.DS, ITEM, "bfloat16"),
    head_tensor("ssm", 64, (128, 128), 4, "float32"),
)
BLOCK = 2096
"""Tokens; at TP1 and TP2 alike the least number of 16 whose page holds a state (`plan --model` says so)."""
TOKEN_BYTES = 2 * HEAD_SIZE * ITEM
"""K and V of one head."""


@dataclass(frozen=True)
class Hybrid:
    """One rank; `base` is where its memory begins."""

    tp: int
    rank: int
    blocks: int
    base: int

    @property
    def page_bytes(self) -> int:
        return BLOCK * KV_HEADS // self.tp * TOKEN_BYTES

    @property
    def length_bytes(self) -> int:
        return STACKS * self.blocks * self.page_bytes

    def table(self) -> RankTable:
        groups = tuple(
            Group(number, "full_attention" if number == ATTENTION else STATE, BLOCK, BLOCK) for number in range(GROUPS)
        )
        regions = tuple(found for layer in range(STACKS * GROUPS) for found in self._regions(layer))
        buffers = (Buffer(self.base, self.length_bytes),)
        return RankTable(self.tp, 1, "LBHNC", {}, groups, regions, buffers)

    def _regions(self, layer: int) -> Iterator[Region]:
        stack, group = divmod(layer, GROUPS)
        base = self.base + stack * self.blocks * self.page_bytes
        name = f"model.layers.{layer}"
        if group == ATTENTION:
            like = Dense(
                KV_HEADS,
                self.tp,
                self.rank,
                tokens=BLOCK,
                blocks=self.blocks,
                head_size=HEAD_SIZE,
                item=ITEM,
                base=base,
            )
            for found in like.regions():
                yield _renamed(found, name, group)
            return
        slots = Slots(layer=name, group=group, base=base, block_stride=self.page_bytes, num_blocks=self.blocks)
        for part in place(TENSORS, self.tp, self.rank):
            yield slots.region(part)


def _renamed(found: Region, name: str, group: int) -> Region:
    return region(
        name,
        found.component,
        base=found.base,
        pages=(found.num_blocks, found.block_stride),
        token=(found.token.count, found.token.stride),
        spans=found.spans,
        unit=found.unit.stride,
        channels=found.channel.count,
        item=found.item_bytes,
        group=group,
    )


def state_bytes(tp: int) -> int:
    """Of one layer on one rank."""
    return sum(local_shape(tensor, tp, 0)[2] for tensor in TENSORS)


def pull_bytes(tokens: int, tp: int) -> int:
    """Of a pull of so many tokens by one of `tp` ranks."""
    attention = STACKS * tokens * KV_HEADS // tp * TOKEN_BYTES
    return attention + (GROUPS - 1) * STACKS * state_bytes(tp)


def block_lists(tokens: int, blocks: int, seed: int) -> list[Ints]:
    """Blocks of all groups out of one pool; null blocks before a state's only one."""
    pages = -(-tokens // BLOCK)
    pool = 1 + np.random.default_rng(seed).permutation(blocks - 1)
    lists = [np.concatenate([np.zeros(pages - 1, np.int64), pool[place : place + 1]]) for place in range(ATTENTION)]
    return [*lists, pool[ATTENTION : ATTENTION + pages]]


def blocks_needed(tokens: int) -> int:
    """Of a cache that holds one request of so many tokens; the null block is one of them."""
    return 1 + (GROUPS - 1) + -(-tokens // BLOCK)


def ranges(tokens: int) -> list[TokenRange]:
    return [TokenRange(0, tokens)] * GROUPS


def dense_like(tokens: int, tp: int, rank: int, base: int) -> Dense:
    """60 attention layers whose pull of so many tokens has as many bytes, in as many blocks of tokens."""
    layers = STACKS * GROUPS
    values = pull_bytes(tokens, tp) * tp // (layers * tokens * KV_HEADS * 2 * ITEM)
    blocks = 1 + -(-tokens // BLOCK)
    return Dense(KV_HEADS, tp, rank, layers, tokens=BLOCK, blocks=blocks, head_size=values, item=ITEM, base=base)


# --- in real memory -------------------------------------------------------------------------------

SEED = 20_261_201


@dataclass(frozen=True)
class HybridCache:
    """One rank's memory, touched."""

    rank: Hybrid
    memory: Bytes = field(repr=False)

    @property
    def table(self) -> RankTable:
        return self.rank.table()

    @property
    def address(self) -> int:
        return self.rank.base

    @property
    def pages(self) -> Bytes:
        """Bytes by stack, block, and place in the page."""
        return self.memory.reshape(STACKS, self.rank.blocks, self.rank.page_bytes)

    def fill(self) -> None:
        """The same bytes in every process."""
        self.memory[:] = np.random.default_rng(SEED).integers(0, 256, self.memory.size, np.uint8)


@dataclass(frozen=True)
class HybridShape:
    """TP1 -> rank 0 of TP2, a pull of `blocks` blocks of tokens and a state of each layer that has one."""

    name: str
    blocks: int

    @property
    def tokens(self) -> int:
        return self.blocks * BLOCK

    @property
    def pull_bytes(self) -> int:
        return pull_bytes(self.tokens, 2)

    def open(self, side: str) -> HybridCache:
        """That side's memory."""
        like = Hybrid(1 if side == "producer" else 2, 0, blocks_needed(self.tokens), 0)
        memory = np.ones(like.length_bytes, np.uint8)
        return HybridCache(Hybrid(like.tp, 0, like.blocks, int(memory.ctypes.data)), memory)

    def lists(self, side: str) -> list[Ints]:
        """That side's blocks of all groups."""
        return block_lists(self.tokens, blocks_needed(self.tokens), len(side))

    def kept(self, blocks: int) -> tuple[tuple[Ints, ...], int]:
        """All of the producer's; there is one pull to be had."""
        if blocks != self.blocks:
            raise ValueError(f"a state is that of all {self.blocks} blocks, not of {blocks}")
        return tuple(self.lists("producer")), self.tokens

    def wanted(self, ids: Ints) -> tuple[tuple[TokenRange, ...], tuple[Ints, ...]]:
        """The consumer's, with these blocks of tokens."""
        return tuple(ranges(self.tokens)), (*self.lists("consumer")[:ATTENTION], ids)

    def wrong_bytes(self, cache: HybridCache) -> int:
        """Bytes of a consumer that are not what a pull brings; where they lie is counted out here."""
        source = self.open("producer")
        source.fill()
        theirs, ours = self.lists("producer"), self.lists("consumer")
        wrong = 0
        for group in range(GROUPS):
            read = slice(None) if group == ATTENTION else slice(-1, None)
            for page, target in zip(theirs[group][read], ours[group][read], strict=True):
                wanted = (_first_head if group == ATTENTION else _first_half)(source.pages[:, page])
                wrong += int((cache.pages[:, target, : wanted.shape[1]] != wanted).sum())
        return wrong


def _first_head(pages: Bytes) -> Bytes:
    return pages[:, : BLOCK * TOKEN_BYTES]


def _first_half(pages: Bytes) -> Bytes:
    """Of q, k, v and of the heads' state, each by itself: channels outermost in the convolution, heads in the state."""
    sizes = (16 * 128 * 3 * 2, 16 * 128 * 3 * 2, 64 * 128 * 3 * 2, 64 * 128 * 128 * 4)
    starts = np.cumsum([0, *sizes[:-1]])
    return np.concatenate([pages[:, at : at + size // 2] for at, size in zip(starts, sizes, strict=True)], axis=1)


HYBRID = HybridShape("hybrid", 2)
