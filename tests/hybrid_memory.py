"""Memory of models with several KV cache groups: state slots, latents, indexers, scales, windows, draft layers.

As in `oracle_memory.py` every element is a hash of what it is. Where it lies is found here with numpy's own axes
(`reshape`, `transpose`), never with the package's strides: regions of state components come from
`core/state_tensors.py`, and what is written into a slot comes from arrays of the shapes vLLM allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

import numpy as np

from mooncake_hetero_tp.core.regions import STATE, Axis, Buffer, Group, RankTable, Region, attention_spans
from mooncake_hetero_tp.core.state_tensors import (
    ConvLayout,
    StateTensor,
    conv_tensor,
    head_tensor,
    place,
    qkv_parts,
    xbc_parts,
)
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.oracle_memory import Arena, Bytes, Ints, RankMemory, oracle

DRAFT = "draft.0.attn"
"""A layer of a draft model, which one side may lack."""

Column: TypeAlias = tuple[str, int, int]
"""(component, global unit, channel) of one place in a tensor's cut axis."""


# --- what is cached -------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenPart:
    """One component of a layer whose cache has a token axis; `units` of the whole model."""

    component: str
    units: int
    channels: int
    item: int


@dataclass(frozen=True)
class StateShape:
    """State of one linear-attention or Mamba layer: `conv` parts, then tensors by heads, each of items of its own."""

    kind: str
    heads: int
    groups: int
    width: int
    kernel_rows: int
    conv_item: int
    head_item: int
    tensors: int = 1

    @property
    def conv_columns(self) -> list[tuple[str, int, int]]:
        """(component, units, channels) of the convolution's projections, as the models' papers have them."""
        if self.kind == "gdn":
            return [
                ("conv.q", self.groups, self.width),
                ("conv.k", self.groups, self.width),
                ("conv.v", self.heads, 2),
            ]
        return [("conv.x", self.heads, 2), ("conv.B", self.groups, self.width), ("conv.C", self.groups, self.width)]

    @property
    def head_shapes(self) -> list[tuple[str, tuple[int, int]]]:
        return [(f"ssm{place or ''}", (2 + place, self.width)) for place in range(self.tensors)]

    def described(self, layout: str) -> list[StateTensor]:
        """The same to the package."""
        if self.kind == "gdn":
            parts = qkv_parts(self.groups, self.heads, self.width, 2)
        else:
            parts = xbc_parts(self.heads, self.groups, 2, self.width)
        dtypes = f"uint{8 * self.conv_item}", f"uint{8 * self.head_item}"
        conv = conv_tensor(parts, self.kernel_rows, ConvLayout(layout), self.conv_item, dtypes[0])
        heads = [head_tensor(name, self.heads, inner, self.head_item, dtypes[1]) for name, inner in self.head_shapes]
        return [conv, *heads]


@dataclass(frozen=True)
class HybridLayer:
    """One layer: a group of the model, and either token parts or a state."""

    name: str
    group: int
    parts: tuple[TokenPart, ...] = ()
    state: StateShape | None = None


@dataclass(frozen=True)
class GroupSpec:
    """One KV cache group of one engine: sizes in tokens; `window` clips what is loaded."""

    block_size: int
    kernel_block_size: int
    is_state: bool = False
    window: int | None = None

    @property
    def kernel_pages(self) -> int:
        return 1 if self.is_state else self.block_size // self.kernel_block_size

    def clip(self, tokens: TokenRange) -> TokenRange:
        return tokens if self.window is None else TokenRange(max(tokens.start, tokens.end - self.window), tokens.end)


@dataclass(frozen=True)
class HybridSide:
    """One engine. `order` gives, per group of the table, the model's group; `orders` the axes of each component."""

    tp: int
    stages: tuple[int, ...]
    """How many layers each pipeline stage holds."""
    layers: tuple[HybridLayer, ...]
    groups: tuple[GroupSpec, ...]
    order: tuple[int, ...]
    orders: Mapping[str, str] = field(default_factory=dict)
    """HNC, NHC or HCN (transposed over the page); HNC where a component is not named."""
    conv_layout: str = "DS"
    pad_bytes: int = 0
    gap_bytes: int = 0
    """Between components of a page."""
    block_first: bool = False
    overlay: bool = False
    """All groups over one another in one allocation, block ids from one pool."""
    num_blocks: int = 24

    def stage(self, pp: int) -> tuple[HybridLayer, ...]:
        start = sum(self.stages[:pp])
        return self.layers[start : start + self.stages[pp]]


def held_units(units: int, tp: int, rank: int) -> list[int]:
    """Units of one rank, counted out: all ranks in turn where there are enough, else several ranks to a unit."""
    if units >= tp:
        return list(range(units))[rank * (units // tp) : (rank + 1) * (units // tp)]
    return [rank // (tp // units)]


# --- one page, one slot ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Component:
    """Byte offsets of each element in a page, `[unit, token or row, channel]`, and what they are called."""

    name: str
    offsets: Ints
    units: list[int]
    item: int
    region: Callable[[int, Group, int, int], Region]
    """(address of page 0, group, pages, page stride) -> Region."""


@dataclass(frozen=True)
class LayerPage:
    """One layer's page: bytes without padding, and its components."""

    layer: HybridLayer
    content: int
    components: list[Component]


def token_page(side: HybridSide, layer: HybridLayer, tokens: int, rank: int) -> LayerPage:
    start, made = 0, []
    for part in layer.parts:
        units = held_units(part.units, side.tp, rank)
        order = side.orders.get(part.component, "HNC")
        counts = {"H": len(units), "N": tokens, "C": part.channels}
        dense = np.arange(prod(counts.values())).reshape([counts[axis] for axis in order])
        offsets = start + part.item * dense.transpose([order.index(axis) for axis in "HNC"])
        made.append(
            Component(part.component, offsets, units, part.item, _token_region(side, layer, part, offsets, rank))
        )
        start += part.item * dense.size + side.gap_bytes
    return LayerPage(layer, start, made)


def _token_region(
    side: HybridSide, layer: HybridLayer, part: TokenPart, offsets: Ints, rank: int
) -> Callable[[int, Group, int, int], Region]:
    def axis(number: int) -> Axis:
        picked = [0, 0, 0]
        picked[number] = min(1, offsets.shape[number] - 1)
        return Axis(offsets.shape[number], int(offsets[tuple(picked)] - offsets[0, 0, 0]))

    def region(address: int, group: Group, pages: int, stride: int) -> Region:
        return Region(
            layer=layer.name, component=part.component, group=group.index, base=address + int(offsets[0, 0, 0]),
            block_stride=stride, num_blocks=pages, spans=attention_spans(part.units, side.tp, rank), unit=axis(0),
            token=axis(1), channel=axis(2), item_bytes=part.item, dtype=f"uint{8 * part.item}", encoding="packed",
        )  # fmt: skip

    return region


def state_slot(side: HybridSide, layer: HybridLayer, rank: int) -> LayerPage:
    """Tensors back to back, as vLLM allocates them; regions as the package places them."""
    assert layer.state is not None
    shape, start = layer.state, 0
    columns: list[Column] = []
    for name, units, channels in shape.conv_columns:
        columns += [(name, unit, channel) for unit in held_units(units, side.tp, rank) for channel in range(channels)]
    dense = np.arange(len(columns) * shape.kernel_rows)
    if side.conv_layout == "DS":
        by_column = dense.reshape(len(columns), shape.kernel_rows)
    else:
        by_column = dense.reshape(shape.kernel_rows, len(columns)).T
    found: dict[str, tuple[Ints, list[int], int]] = {}
    for name, units, channels in shape.conv_columns:
        mine = [place for place, column in enumerate(columns) if column[0] == name]
        offsets = shape.conv_item * by_column[mine].reshape(-1, channels, shape.kernel_rows).transpose(0, 2, 1)
        found[name] = (offsets, held_units(units, side.tp, rank), shape.conv_item)
    start = shape.conv_item * dense.size
    for name, inner in shape.head_shapes:
        heads = held_units(shape.heads, side.tp, rank)
        array = np.arange(len(heads) * prod(inner)).reshape(len(heads), *inner)
        found[name] = (start + shape.head_item * array, heads, shape.head_item)
        start += shape.head_item * array.size
    placed = {part.component: part for part in place(shape.described(side.conv_layout), side.tp, rank)}
    assert list(placed) == list(found)

    def region_of(name: str) -> Callable[[int, Group, int, int], Region]:
        part = placed[name]

        def region(address: int, group: Group, pages: int, stride: int) -> Region:
            return Region(
                layer=layer.name, component=name, group=group.index, base=address + part.offset, block_stride=stride,
                num_blocks=pages, spans=part.spans, unit=part.unit, token=part.row, channel=part.channel,
                item_bytes=part.item_bytes, dtype=part.dtype, encoding="state",
            )  # fmt: skip

        return region

    return LayerPage(layer, start, [Component(name, *element, region_of(name)) for name, element in found.items()])


# --- one rank -------------------------------------------------------------------------------------


@dataclass
class HybridMemory(RankMemory):
    """One rank's memory and where each layer's page 0 begins."""

    pages: list[tuple[LayerPage, int, int, int]] = field(default_factory=list)
    """(page, table group, offset of page 0, page stride)"""
    unfilled: frozenset[str] = frozenset()
    """Layers that the other side does not have."""

    def fill(self, blocks: Sequence[Ints], ranges: Sequence[TokenRange], memory: Bytes | None = None) -> None:
        target = self.memory if memory is None else memory
        for page, group, offset, stride in self.pages:
            if page.layer.name in self.unfilled or not ranges[group].count:
                continue
            for part in page.components:
                rows = part.offsets.shape[1]
                labels, numbers, places = _elements(self.table.groups[group], rows, blocks[group], ranges[group])
                index = part.offsets[:, places] + (offset + numbers * stride)[None, :, None]
                name, channels = f"{page.layer.name}/{part.name}", part.offsets.shape[2]
                values = oracle(name, np.array(part.units), labels, channels, part.item)
                into = index[..., None] + np.arange(part.item)
                target[into] = np.ascontiguousarray(values).view(np.uint8).reshape(into.shape)


def _elements(group: Group, rows: int, blocks: Ints, tokens: TokenRange) -> tuple[Ints, Ints, Ints]:
    """(label, kernel page, place in it) of every token of the range, or of every row of its one slot."""
    if group.is_state:
        row = np.arange(rows)
        slot = int(blocks[(tokens.end + group.block_size - 1) // group.block_size - 1])
        return row + 64 * tokens.end, np.full(rows, slot), row
    label = np.arange(tokens.start, tokens.end)
    pages = blocks[label // group.block_size] * (group.block_size // group.kernel_block_size)
    return label, pages + label % group.block_size // group.kernel_block_size, label % group.kernel_block_size


def build_hybrid(side: HybridSide, rank: Rank, arena: Arena, unfilled: frozenset[str] = frozenset()) -> HybridMemory:
    """One rank's regions and memory; all bytes are arbitrary until filled."""
    groups, grouped = [], []
    for index, number in enumerate(side.order):
        spec = side.groups[number]
        kind = STATE if spec.is_state else "attention" if spec.window is None else "sliding_window"
        groups.append(Group(index, kind, spec.block_size, spec.kernel_block_size))
        mine = [layer for layer in side.stage(rank.pp) if layer.group == number]
        grouped.append(
            [
                state_slot(side, layer, rank.tp) if spec.is_state
                else token_page(side, layer, spec.kernel_block_size, rank.tp)
                for layer in mine
            ]
        )  # fmt: skip
    placed, starts, size = _place_groups(side, groups, grouped)
    address, memory = arena.take(size or 1)
    regions = [
        part.region(address + offset, groups[group], side.num_blocks * groups[group].kernel_pages, stride)
        for page, group, offset, stride in placed
        for part in page.components
    ]
    ends = [*starts[1:], size]
    buffers = [Buffer(address + start, end - start) for start, end in zip(starts, ends, strict=True) if end > start]
    table = RankTable(
        side.tp,
        len(side.stages),
        "LBHNC",
        {},
        tuple(groups),
        tuple(regions),
        tuple(buffers or [Buffer(address, 1)]),
        draft_layers=tuple({region.layer for region in regions if region.layer == DRAFT}),
    )
    return HybridMemory(rank, table, address, memory, placed, unfilled)


def _place_groups(
    side: HybridSide, groups: Sequence[Group], grouped: Sequence[Sequence[LayerPage]]
) -> tuple[list[tuple[LayerPage, int, int, int]], list[int], int]:
    """Where pages lie; where allocations begin; how long they are together."""
    if side.overlay:
        needed = [sum(_strides(side, pages)) * group.kernel_pages for group, pages in zip(groups, grouped, strict=True)]
        block = -(-max(needed, default=0) // 48) * 48  # kernel pages of any count divide it
        found = [
            (page, index, offset, block // groups[index].kernel_pages)
            for index, pages in enumerate(grouped)
            for page, offset in _in_a_row(side, pages)
        ]
        return found, [0], block * side.num_blocks
    found, starts, start = [], [], 0
    for index, (group, pages) in enumerate(zip(groups, grouped, strict=True)):
        count = side.num_blocks * group.kernel_pages
        starts.append(start)
        together = sum(_strides(side, pages))
        for page, offset in _in_a_row(side, pages):
            stride = together if side.block_first else page.content + side.pad_bytes
            found.append((page, index, start + (offset if side.block_first else offset * count), stride))
        start += together * count
    return found, starts, start


def _strides(side: HybridSide, pages: Sequence[LayerPage]) -> list[int]:
    return [page.content + side.pad_bytes for page in pages]


def _in_a_row(side: HybridSide, pages: Sequence[LayerPage]) -> Iterator[tuple[LayerPage, int]]:
    offset = 0
    for page, stride in zip(pages, _strides(side, pages), strict=True):
        yield page, offset
        offset += stride
