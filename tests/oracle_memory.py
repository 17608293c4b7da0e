"""KV caches in real memory whose every element is a hash of (layer, component, global unit, token, channel).

Strides come from numpy arrays made in the layout's order or are written out per encoding, so nothing here
shares arithmetic with the package.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from mooncake_hetero_tp.core.regions import (
    STATE,
    Axis,
    Buffer,
    Group,
    RankTable,
    Region,
    Span,
    attention_spans,
    whole_span,
)
from mooncake_hetero_tp.types import Rank, TokenRange

Bytes: TypeAlias = npt.NDArray[np.uint8]
Ints: TypeAlias = npt.NDArray[np.int64]

VLLM_LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
PAGE_ENCODINGS = ("cpu", "halves", "head_halves", "slots", "planes")
"""Pages with an inner order of their own: whatever the layout's last three letters say, they do not apply."""
ITEM_TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32}


# --- what is cached ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """One model layer: `attention` (k, v), `latent` (replicated) or `state` (conv.q/k/v and ssm)."""

    name: str
    kind: str = "attention"
    units: int = 1
    channels: int = 4

    @property
    def group(self) -> int:
        return int(self.kind == "state")


@dataclass(frozen=True)
class SideSpec:
    """How one engine holds the cache. Sizes in tokens and logical blocks; `pad_bytes` after each page."""

    tp: int = 1
    pp: int = 1
    layout: str = "LBHNC"
    encoding: str = "packed"
    block_size: int = 4
    kernel_block_size: int = 4
    pad_bytes: int = 0
    num_blocks: int = 8
    buffer_per_layer: bool = False
    state_rows_first: bool = True

    @property
    def kernel_pages(self) -> int:
        return self.block_size // self.kernel_block_size


def oracle(name: str, units: Ints, tokens: Ints, channels: int, item_bytes: int) -> npt.NDArray[Any]:
    """Values `[units, tokens, channels]` of a layer's component, by SplitMix64's finaliser; tokens may be rows."""
    mixed = (units.astype(np.uint64)[:, None, None] << np.uint64(32)) + (
        np.uint64(crc32(name.encode())) << np.uint64(40)
    )
    mixed = mixed + (tokens.astype(np.uint64)[None, :, None] << np.uint64(12))
    mixed = (mixed + np.arange(channels, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = mixed ^ (mixed >> np.uint64(27))
    return mixed.astype(ITEM_TYPES[item_bytes])


# --- where it lies -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """One component of one layer in an allocation: byte offsets and strides."""

    component: str
    offset: int
    block: int
    unit: int
    token: int
    channel: int


def dense_strides(order: str, counts: dict[str, int], item_bytes: int) -> dict[str, int]:
    """Byte strides of a numpy array whose axes are `order`."""
    array = np.empty([counts[dim] for dim in order], ITEM_TYPES[item_bytes])
    return dict(zip(order, array.strides, strict=True))


def attention_places(
    spec: SideSpec, layers: int, heads: int, channels: int, item: int
) -> tuple[list[list[Place]], int]:
    """Places of k and v of each layer in one allocation, and its size."""
    pages, tokens = spec.num_blocks * spec.kernel_pages, spec.kernel_block_size
    if spec.encoding == "packed" and not spec.pad_bytes:
        counts = {"L": layers, "B": pages, "H": heads, "N": tokens, "C": 2 * channels}
        step = dense_strides(spec.layout, counts, item)
        return [
            [
                Place(name, i * step["L"] + half * channels * item, step["B"], step["H"], step["N"], step["C"])
                for half, name in enumerate("kv")
            ]
            for i in range(layers)
        ], item * int(np.prod(list(counts.values())))
    content = item * 2 * heads * tokens * channels
    page = content + spec.pad_bytes
    layer_step, block_step = (page * pages, page) if spec.layout.startswith("LB") else (page, page * layers)
    inner = _page_places(spec, heads, tokens, channels, item)
    if spec.encoding == "planes":
        plane = content // 2 * pages
        layer_step, block_step = 2 * plane, content // 2
        inner = [Place(p.component, i * plane, 0, p.unit, p.token, p.channel) for i, p in enumerate(inner)]
    return [
        [Place(p.component, i * layer_step + p.offset, block_step, p.unit, p.token, p.channel) for p in inner]
        for i in range(layers)
    ], page * pages * layers


def _page_places(spec: SideSpec, heads: int, tokens: int, channels: int, item: int) -> list[Place]:
    """Both halves inside one page of the given encoding (block stride 0)."""
    half, head = heads * tokens * channels * item, tokens * channels * item
    row = channels * item
    if spec.encoding == "packed":
        step = dense_strides(spec.layout[2:], {"H": heads, "N": tokens, "C": 2 * channels}, item)
        return [Place(name, i * row, 0, step["H"], step["N"], item) for i, name in enumerate("kv")]
    if spec.encoding == "cpu":  # vLLM's CPU attention: K as [H][D][N], V as [H][N][D]
        return [Place("k", 0, 0, head, item, tokens * item), Place("v", half, 0, head, row, item)]
    if spec.encoding == "head_halves":
        return [Place(name, i * head, 0, 2 * head, row, item) for i, name in enumerate("kv")]
    if spec.encoding == "slots":  # tokens first, heads inside of them
        return [Place(name, i * half, 0, row, heads * row, item) for i, name in enumerate("kv")]
    return [Place(name, i * half, 0, head, row, item) for i, name in enumerate("kv")]


STATE_PARTS = (("conv.q", 1, 3), ("conv.k", 1, 3), ("conv.v", 2, 3), ("ssm", 1, 2))
"""(component, units per head, state rows) of the oracle's linear-attention layers."""


def state_places(spec: SideSpec, heads: int, channels: int, item: int) -> tuple[list[Place], int]:
    """Components back to back in one padded slot; conv rows are (row, unit) or (unit, row)."""
    places, offset = [], 0
    for component, ratio, rows in STATE_PARTS:
        units = heads * ratio
        width = channels if component == "ssm" else 1
        unit, row = (
            (width * item, units * width * item) if spec.state_rows_first else (rows * width * item, width * item)
        )
        places.append(Place(component, offset, 0, unit, row, item))
        offset += units * rows * width * item
    slot = offset + spec.pad_bytes
    return [Place(p.component, p.offset, slot, p.unit, p.token, p.channel) for p in places], slot


# --- one rank ------------------------------------------------------------------------------------


class Arena:
    """One real allocation, registered once, from which ranks take their memory."""

    def __init__(self, length_bytes: int) -> None:
        self.memory: Bytes = np.zeros(length_bytes, np.uint8)
        self.address = int(self.memory.ctypes.data)
        self._taken = 0

    def reset(self) -> None:
        self._taken = 0

    def take(self, length_bytes: int, align: int = 64) -> tuple[int, Bytes]:
        start = -(-self._taken // align) * align
        self._taken = start + length_bytes
        if self._taken > self.memory.size:
            raise MemoryError(f"arena of {self.memory.size} bytes, {self._taken} wanted")
        return self.address + start, self.memory[start : self._taken]


@dataclass
class RankMemory:
    """One rank's table and the bytes it describes."""

    rank: Rank
    table: RankTable
    address: int
    memory: Bytes

    def fill(self, blocks: Sequence[Ints], ranges: Sequence[TokenRange], memory: Bytes | None = None) -> None:
        """Writes the oracle's values of the ranges (per group) into `memory` (own by default)."""
        target = self.memory if memory is None else memory
        for region in self.table.regions:
            group = self.table.groups[region.group]
            units = np.concatenate([np.arange(s.global_start, s.global_start + s.count) for s in region.spans])
            labels, pages, offsets = _tokens_of(group, region, blocks[region.group], ranges[region.group])
            index = _element_index(region, self.address, pages, offsets)
            values = oracle(region.name, units, labels, region.channel.count, region.item_bytes)
            target.view(ITEM_TYPES[region.item_bytes])[index // region.item_bytes] = values


def _tokens_of(group: Group, region: Region, blocks: Ints, tokens: TokenRange) -> tuple[Ints, Ints, Ints]:
    """(oracle token or row, kernel page id, place in the page) of everything in the range."""
    if group.is_state:
        rows = np.arange(region.token.count) if tokens.count else np.empty(0, np.int64)
        slot = int(blocks[-(-tokens.end // group.block_size) - 1]) if tokens.count else 0
        return rows + 64 * tokens.end, np.full(rows.size, slot), rows
    label = np.arange(tokens.start, tokens.end)
    in_block = label % group.block_size
    pages = blocks[label // group.block_size] * (group.block_size // group.kernel_block_size)
    return label, pages + in_block // group.kernel_block_size, in_block % group.kernel_block_size


def _element_index(region: Region, address: int, pages: Ints, offsets: Ints) -> Ints:
    units = np.arange(region.unit.count) * region.unit.stride
    places = pages * region.block_stride + offsets * region.token.stride
    channels = np.arange(region.channel.count) * region.channel.stride
    index: Ints = units[:, None, None] + places[None, :, None] + channels + (region.base - address)
    return index


def split_layers(layers: Sequence[Layer], pp: int) -> list[list[Layer]]:
    """Consecutive stages, the last ones shorter."""
    borders = [-(-len(layers) * stage // pp) for stage in range(pp + 1)]
    return [list(layers[start:stop]) for start, stop in pairwise(borders)]


def build_rank(spec: SideSpec, layers: Sequence[Layer], item: int, rank: Rank, arena: Arena) -> RankMemory:
    """One rank's regions and memory; all bytes are arbitrary until filled.

    Raises:
        ConfigError: TP and heads do not fit each other.
    """
    mine = split_layers(layers, spec.pp)[rank.pp]
    plans = [*_attention(spec, mine, item, rank), *_latent(spec, mine, item), *_state(spec, mine, item, rank)]
    address, memory = arena.take(sum(size for size, _ in plans) or 1)
    regions: list[Region] = []
    buffers: list[Buffer] = []
    start = address
    for size, made in plans:
        buffers.append(Buffer(start, size))
        regions.extend(maker.region(start) for maker in made)
        start += size
    if not spec.buffer_per_layer:
        buffers = [Buffer(address, memory.size)]
    groups = (
        Group(0, "attention", spec.block_size, spec.kernel_block_size),
        Group(1, STATE, spec.block_size, spec.block_size),
    )
    table = RankTable(spec.tp, spec.pp, spec.layout, {}, groups, tuple(regions), tuple(buffers))
    return RankMemory(rank, table, address, memory)


@dataclass(frozen=True)
class Maker:
    """All of a region but its allocation's address."""

    spec: SideSpec
    layer: Layer
    place: Place
    spans: tuple[Span, ...]
    rows: int
    item: int
    encoding: str

    def region(self, address: int) -> Region:
        state = self.layer.kind == "state"
        channels = 1 if self.place.component.startswith("conv") else self.layer.channels
        return Region(
            layer=self.layer.name,
            component=self.place.component,
            group=self.layer.group,
            base=address + self.place.offset,
            block_stride=self.place.block,
            num_blocks=self.spec.num_blocks * (1 if state else self.spec.kernel_pages),
            spans=self.spans,
            unit=Axis(sum(span.count for span in self.spans), self.place.unit),
            token=Axis(self.rows, self.place.token),
            channel=Axis(channels, self.place.channel),
            item_bytes=self.item,
            dtype=f"uint{8 * self.item}",
            encoding=self.encoding,
        )


Allocation: TypeAlias = tuple[int, list[Maker]]
"""Bytes to allocate and what makes its regions, given the address."""


def _attention(spec: SideSpec, layers: Sequence[Layer], item: int, rank: Rank) -> Iterator[Allocation]:
    chosen = [layer for layer in layers if layer.kind == "attention"]
    batches = [[layer] for layer in chosen] if spec.buffer_per_layer else [chosen] if chosen else []
    for batch in batches:
        spans = attention_spans(batch[0].units, spec.tp, rank.tp)
        places, size = attention_places(spec, len(batch), spans[0].count, batch[0].channels, item)
        yield (
            size,
            [
                Maker(spec, layer, place, spans, spec.kernel_block_size, item, spec.encoding)
                for layer, both in zip(batch, places, strict=True)
                for place in both
            ],
        )


def _latent(spec: SideSpec, layers: Sequence[Layer], item: int) -> Iterator[Allocation]:
    for layer in layers:
        if layer.kind == "latent":
            row = layer.channels * item
            page = row * spec.kernel_block_size + spec.pad_bytes
            place = Place("latent", 0, page, page, row, item)
            maker = Maker(spec, layer, place, whole_span(1), spec.kernel_block_size, item, "rows")
            yield page * spec.num_blocks * spec.kernel_pages, [maker]


def _state(spec: SideSpec, layers: Sequence[Layer], item: int, rank: Rank) -> Iterator[Allocation]:
    for layer in layers:
        if layer.kind == "state":
            (heads,) = attention_spans(layer.units, spec.tp, rank.tp)
            places, slot = state_places(spec, heads.count, layer.channels, item)
            makers = []
            for place, (_, ratio, rows) in zip(places, STATE_PARTS, strict=True):
                spans = (Span(0, heads.global_start * ratio, heads.count * ratio),)
                makers.append(Maker(spec, layer, place, spans, rows, item, "state"))
            yield slot * spec.num_blocks, makers


def build_engine(spec: SideSpec, layers: Sequence[Layer], item: int, arena: Arena) -> dict[Rank, RankMemory]:
    """All ranks of one engine."""
    ranks = [Rank(0, pp, tp) for pp in range(spec.pp) for tp in range(spec.tp)]
    return {rank: build_rank(spec, layers, item, rank, arena) for rank in ranks}
