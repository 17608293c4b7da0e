"""The copies of a pull, as an answer lists them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from mooncake_hetero_tp.cli.layers import Layer, is_dense
from mooncake_hetero_tp.cli.memory import RankMemory
from mooncake_hetero_tp.core.binding import Descriptors
from mooncake_hetero_tp.core.regions import RankTable, Region


class Copy(msgspec.Struct, frozen=True):
    """One contiguous run.

    Offsets count from the start of the layer's array where no block is named, else from the component's place in
    that block.
    """

    layer: str
    component: str
    src: int
    dst: int
    bytes: int
    src_block: int | msgspec.UnsetType = msgspec.UNSET
    dst_block: int | msgspec.UnsetType = msgspec.UNSET

    @property
    def place(self) -> tuple[int, int]:
        """What copies are sorted by."""
        return (0 if isinstance(self.dst_block, msgspec.UnsetType) else self.dst_block, self.dst)


def copies_of(
    runs: Descriptors, layer: Layer, component: str, memories: tuple[RankMemory, RankMemory]
) -> Iterator[Copy]:
    """What binding made of one component of a layer; memories of producer and consumer."""
    if is_dense(layer):
        bases = [memory.address_of(layer.name) for memory in memories]
        for src, dst, length in _triples(runs):
            yield Copy(layer.name, component, src - bases[0], dst - bases[1], length)
        return
    ours, theirs = (_Blocks.of(memory.table, layer.name, component) for memory in memories)
    for src, dst, length in _triples(runs):
        for source, target, piece in _within_blocks((ours, src), (theirs, dst), length):
            yield Copy(layer.name, component, source[1], target[1], piece, source[0], target[0])


def _triples(runs: Descriptors) -> Iterator[tuple[int, int, int]]:
    return zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True)


class _Blocks(msgspec.Struct, frozen=True):
    """Where the logical blocks of one component lie on one rank."""

    base: int
    stride: int
    """Bytes of a logical block, or of what lies between the blocks of an axis outside of them."""
    count: int

    @classmethod
    def of(cls, table: RankTable, layer: str, component: str) -> _Blocks:
        region: Region = next(one for one in table.regions if (one.layer, one.component) == (layer, component))
        pages = table.groups[region.group].kernel_pages
        return cls(region.base, region.block_stride * pages, region.num_blocks // pages)

    def locate(self, address: int) -> tuple[int, int]:
        """(block, offset from the component's place in it); axes outside of the blocks step over all of them."""
        block = (address - self.base) // self.stride % self.count
        return block, address - self.base - block * self.stride

    def left(self, address: int) -> int:
        """Bytes to the next block's begin."""
        return self.stride - (address - self.base) % self.stride


def _within_blocks(
    source: tuple[_Blocks, int], target: tuple[_Blocks, int], length: int
) -> Iterator[tuple[tuple[int, int], tuple[int, int], int]]:
    """A run in pieces of one block on either side: (block, offset) in each, and bytes."""
    (theirs, src), (ours, dst) = source, target
    while length:
        piece = min(length, theirs.left(src), ours.left(dst))
        yield theirs.locate(src), ours.locate(dst), piece
        src, dst, length = src + piece, dst + piece, length - piece
