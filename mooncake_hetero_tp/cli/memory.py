"""The abstract memory of a case: where each rank of each side would keep its KV cache.

Attention layers of one rank that share one shape lie in one dense array `[L, B, H_local, N, C]` in the
layout's physical order; L counts those layers in list order, C is K then V of one head and token. Layers of
another shape (other heads, head size or page size, in whatever group) and of another kind lie in an array of their
own. A state's slot is a page of one head and one token, its components back to back. Offsets count from the start of
the layer's array (`attention`) or from the component's place in its block (all other kinds).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from mooncake_hetero_tp.cli.case import Case, Side
from mooncake_hetero_tp.cli.layers import AttentionLayer, Layer, StateLayer, TokenLayer
from mooncake_hetero_tp.cli.limits import DTYPE_BYTES, SideName
from mooncake_hetero_tp.core.layout import KVLayout
from mooncake_hetero_tp.core.regions import Axis, Buffer, Group, RankTable, Region, attention_spans, whole_span
from mooncake_hetero_tp.core.state_tensors import Slots, place
from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.types import Mismatch, Rank, Severity

ENCODING = "dense"
"""By the order of a state tensor's axes."""
_GAP = 1 << 12
"""Between two arrays, so that nothing is ever merged from one into the next."""


class Array(msgspec.Struct, frozen=True):
    """One dense array of one rank; strides in bytes, shape in pages, tokens and values."""

    layers: tuple[str, ...]
    shape: dict[str, int]
    strides: dict[str, int]
    length_bytes: int
    address: int


class RankMemory(msgspec.Struct, frozen=True):
    """One rank's arrays, and the table that describes them to the planner."""

    arrays: tuple[Array, ...]
    table: RankTable

    def address_of(self, layer: str) -> int:
        """Where the array of `layer` starts."""
        return next(array.address for array in self.arrays if layer in array.layers)


def stage_layers(layers: int, pp_size: int) -> list[range]:
    """Indices of the layers of each pipeline stage, by vLLM's rule (`get_pp_indices`, vllm/distributed/utils.py).

    Layers that remain after an even split go one each to the stages before the last, from the back; the last
    stage gets one only if all others have.
    """
    counts = [layers // pp_size] * pp_size
    for step in range(layers % pp_size):
        counts[-2 - step] += 1
    ends = [sum(counts[: stage + 1]) for stage in range(pp_size)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def engine_memory(case: Case, name: SideName) -> dict[Rank, RankMemory]:
    """All ranks of one side, by pipeline and tensor rank.

    Raises:
        ConfigError: TP does not fit the heads, or a page is longer than `page_size_padded`.
    """
    side = case.sides[name]
    stages = stage_layers(len(case.layers), side.pp)
    try:
        return {
            Rank(pp=pp, tp=tp): _rank_memory(case, side, [case.layers[place] for place in stages[pp]], tp)
            for pp in range(side.pp)
            for tp in range(side.tp)
        }
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def refusals(case: Case) -> list[Mismatch]:
    """What makes one of the two memories impossible, each with the settings of both sides."""
    return [*_layout_refusals(case), *_head_refusals(case)]


# --- one rank --------------------------------------------------------------------------------------------------------


class Shape(msgspec.Struct, frozen=True):
    """What layers of one array have in common: pages, heads, tokens of a page, values of one head and token."""

    kind: str
    pages: int
    heads: int
    tokens: int
    values: int
    item_bytes: int
    page_bytes: int | None
    """What each page is padded to."""


def _rank_memory(case: Case, side: Side, layers: Sequence[Layer], tp_rank: int) -> RankMemory:
    alike: dict[Shape, list[Layer]] = {}
    for layer in layers:
        alike.setdefault(_shape(case, side, layer), []).append(layer)
    arrays: list[Array] = []
    regions: dict[str, list[Region]] = {}
    address = _GAP
    for shape, members in alike.items():
        array = _array(side, shape, members, address)
        arrays.append(array)
        for number, layer in enumerate(members):
            regions[layer.name] = [*_regions(case, side, array, (number, layer), tp_rank)]
        address = -(-(address + array.length_bytes) // _GAP) * _GAP + _GAP
    table = RankTable(
        tp_size=side.tp,
        pp_size=side.pp,
        layout=side.layout,
        model={},
        groups=tuple(_group(case, side, group) for group in case.groups),
        regions=tuple(region for layer in layers for region in regions[layer.name]),
        buffers=tuple(Buffer(array.address, array.length_bytes) for array in arrays),
    )
    return RankMemory(tuple(arrays), table)


def _group(case: Case, side: Side, group: int) -> Group:
    block = side.block_size_of(group)
    kernel = block if case.is_state(group) else side.kernel_block_size_of(group)
    return Group(group, case.kind_of(group), block, kernel)


def _shape(case: Case, side: Side, layer: Layer) -> Shape:
    padded = side.page_size_of(layer.group)
    if isinstance(layer, StateLayer):
        parts = place(layer.tensors(side.conv_layout, case.dtype), side.tp, 0)
        live = sum(part.unit.count * part.row.count * part.channel.count * part.item_bytes for part in parts)
        return Shape(layer.kind, side.num_blocks, 1, 1, live, 1, padded)
    block, kernel = side.block_size_of(layer.group), side.kernel_block_size_of(layer.group)
    pages = side.num_blocks * (block // kernel)
    if isinstance(layer, AttentionLayer):
        heads = sum(span.count for span in attention_spans(layer.kv_heads, side.tp, 0))
        return Shape(layer.kind, pages, heads, kernel, 2 * layer.head_size, case.item_bytes, padded)
    return Shape(layer.kind, pages, 1, kernel, layer.bytes_per_token, 1, padded)


def _array(side: Side, shape: Shape, members: Sequence[Layer], address: int) -> Array:
    layout = KVLayout.from_name(side.layout)
    sizes = (len(members), shape.pages, shape.heads, shape.tokens, shape.values)
    counts = dict(zip("LBHNC", sizes, strict=True))
    strides = layout.strides(counts, shape.item_bytes, shape.page_bytes)
    outermost = layout.order[0]
    return Array(
        layers=tuple(layer.name for layer in members),
        shape=counts,
        strides=strides,
        length_bytes=strides[outermost] * counts[outermost],
        address=address,
    )


def _regions(case: Case, side: Side, array: Array, member: tuple[int, Layer], tp_rank: int) -> Iterator[Region]:
    number, layer = member
    base = array.address + number * array.strides["L"]
    if isinstance(layer, StateLayer):
        yield from _state_regions(case, side, array, (base, layer), tp_rank)
    else:
        yield _token_region(case, side, array, (base, layer), tp_rank)


def _token_region(case: Case, side: Side, array: Array, member: tuple[int, TokenLayer], tp_rank: int) -> Region:
    base, layer = member
    heads = isinstance(layer, AttentionLayer)
    dtype = case.dtype if heads else "uint8"
    return Region(
        layer=layer.name,
        component=layer.component,
        group=layer.group,
        base=base,
        block_stride=array.strides["B"],
        num_blocks=array.shape["B"],
        spans=attention_spans(layer.units, side.tp, tp_rank) if heads else whole_span(1),
        unit=Axis(array.shape["H"], array.strides["H"]),
        token=Axis(array.shape["N"], array.strides["N"]),
        channel=Axis(array.shape["C"], array.strides["C"]),
        item_bytes=DTYPE_BYTES[dtype],
        dtype=dtype,
        encoding=ENCODING,
    )


def _state_regions(
    case: Case, side: Side, array: Array, member: tuple[int, StateLayer], tp_rank: int
) -> Iterator[Region]:
    base, layer = member
    slots = Slots(
        layer=layer.name,
        group=layer.group,
        base=base,
        block_stride=array.strides["B"],
        num_blocks=array.shape["B"],
    )
    for part in place(layer.tensors(side.conv_layout, case.dtype), side.tp, tp_rank):
        yield slots.region(part)


# --- what cannot be laid out -----------------------------------------------------------------------------------------


def _layout_refusals(case: Case) -> Iterator[Mismatch]:
    layouts = {name: KVLayout.from_name(side.layout) for name, side in case.sides.items()}
    padded = {name: _padded_groups(case, side) for name, side in case.sides.items()}
    split = {name: _split_groups(case, side) for name, side in case.sides.items()}
    if not all(layout.is_content_innermost for layout in layouts.values()):
        yield _mismatch(
            "layout",
            {name: str(layout) for name, layout in layouts.items()},
            "the content of one head and token is not contiguous, which no backend reads",
            "use a layout that ends in C",
        )
    if any(padded[name] and not layouts[name].is_page_outermost for name in layouts):
        yield _mismatch(
            "page_size_padded",
            {name: f"{side.page_size_padded or 'no padding'} in {side.layout}" for name, side in case.sides.items()},
            "only a page that is one run can be padded",
            "use LBHNC, LBNHC, BLHNC or BLNHC, or no padding",
        )
    if any(split[name] & padded[name] or (split[name] and not layouts[name].is_page_splittable) for name in layouts):
        yield _mismatch(
            "kernel_block_size",
            {name: _kernel_blocks(case, side) for name, side in case.sides.items()},
            "a block that is not one dense page cannot be split into kernel blocks",
            "use unpadded LBHNC or LBNHC, or kernel_block_size = block_size",
        )


def _head_refusals(case: Case) -> Iterator[Mismatch]:
    for layer in case.layers:
        told: Mapping[str, str] = {name: f"TP{side.tp}" for name, side in case.sides.items()}
        for side in case.sides.values():
            for count, what in layer.shared:
                try:
                    attention_spans(count, side.tp, 0, what=what)
                except ConfigError as error:
                    yield _mismatch(
                        "tp",
                        told,
                        str(error),
                        f"choose a tensor_parallel_size that divides the {what} or is a multiple of them",
                        layer.name,
                    )


def _mismatch(field: str, values: Mapping[str, str], effect: str, remedy: str, layer: str | None = None) -> Mismatch:
    return Mismatch(field, values["producer"], values["consumer"], Severity.REFUSE, effect, remedy, layer)


def _padded_groups(case: Case, side: Side) -> set[int]:
    return {group for group in case.groups if side.page_size_of(group) is not None}


def _split_groups(case: Case, side: Side) -> set[int]:
    tokens = [group for group in case.groups if not case.is_state(group)]
    return {group for group in tokens if side.kernel_block_size_of(group) < side.block_size_of(group)}


def _kernel_blocks(case: Case, side: Side) -> str:
    sizes = ", ".join(f"{side.kernel_block_size_of(group)} of {side.block_size_of(group)}" for group in case.groups)
    return f"{sizes} tokens in {side.layout}" + (", padded" if side.page_size_padded is not None else "")
