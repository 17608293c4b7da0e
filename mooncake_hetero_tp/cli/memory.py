"""The abstract memory of a case: where each rank of each side would keep its KV cache.

Attention layers of one rank that share one shape lie in one dense array `[L, B, H_local, N, C]` in the
layout's physical order; L counts those layers in list order, C is K then V of one head and token. Layers of
another shape (other heads, head size or page size, in whatever group) lie in an array of their own. Offsets
count from the start of the layer's array.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from mooncake_hetero_tp.cli.case import AttentionLayer, Case, Side, SideName
from mooncake_hetero_tp.core.layout import KVLayout
from mooncake_hetero_tp.core.regions import Axis, Buffer, Group, RankTable, Region, attention_spans
from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.types import Mismatch, Rank, Severity

COMPONENT = "kv"
ENCODING = "dense"
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

Shape = tuple[int, int, int, int]
"""Pages, heads, tokens of a page, values of one head and token."""


def _rank_memory(case: Case, side: Side, layers: Sequence[AttentionLayer], tp_rank: int) -> RankMemory:
    alike: dict[Shape, list[AttentionLayer]] = {}
    for layer in layers:
        alike.setdefault(_shape(side, layer), []).append(layer)
    arrays: list[Array] = []
    regions: dict[str, Region] = {}
    address = _GAP
    for shape, members in alike.items():
        array = _array(case, side, shape, members, address)
        arrays.append(array)
        regions.update(_regions(case, side, array, members, tp_rank))
        address = -(-(address + array.length_bytes) // _GAP) * _GAP + _GAP
    table = RankTable(
        tp_size=side.tp,
        pp_size=side.pp,
        layout=side.layout,
        model={},
        groups=tuple(
            Group(group, "attention", side.block_size_of(group), side.kernel_block_size_of(group))
            for group in case.groups
        ),
        regions=tuple(regions[layer.name] for layer in layers),
        buffers=tuple(Buffer(array.address, array.length_bytes) for array in arrays),
    )
    return RankMemory(tuple(arrays), table)


def _shape(side: Side, layer: AttentionLayer) -> Shape:
    block, kernel = side.block_size_of(layer.group), side.kernel_block_size_of(layer.group)
    heads = sum(span.count for span in attention_spans(layer.kv_heads, side.tp, 0))
    return side.num_blocks * (block // kernel), heads, kernel, 2 * layer.head_size


def _array(case: Case, side: Side, shape: Shape, members: Sequence[AttentionLayer], address: int) -> Array:
    layout = KVLayout.from_name(side.layout)
    counts = dict(zip("LBHNC", (len(members), *shape), strict=True))
    strides = layout.strides(counts, case.item_bytes, side.page_size_padded)
    outermost = layout.order[0]
    return Array(
        layers=tuple(layer.name for layer in members),
        shape=counts,
        strides=strides,
        length_bytes=strides[outermost] * counts[outermost],
        address=address,
    )


def _regions(
    case: Case, side: Side, array: Array, members: Sequence[AttentionLayer], tp_rank: int
) -> Iterator[tuple[str, Region]]:
    for place, layer in enumerate(members):
        yield (
            layer.name,
            Region(
                layer=layer.name,
                component=COMPONENT,
                group=layer.group,
                base=array.address + place * array.strides["L"],
                block_stride=array.strides["B"],
                num_blocks=array.shape["B"],
                spans=attention_spans(layer.kv_heads, side.tp, tp_rank),
                unit=Axis(array.shape["H"], array.strides["H"]),
                token=Axis(array.shape["N"], array.strides["N"]),
                channel=Axis(array.shape["C"], array.strides["C"]),
                item_bytes=case.item_bytes,
                dtype=case.dtype,
                encoding=ENCODING,
            ),
        )


# --- what cannot be laid out -----------------------------------------------------------------------------------------


def _layout_refusals(case: Case) -> Iterator[Mismatch]:
    layouts = {name: KVLayout.from_name(side.layout) for name, side in case.sides.items()}
    padded = {name: side.page_size_padded is not None for name, side in case.sides.items()}
    split = {name: _is_split(case, side) for name, side in case.sides.items()}
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
    if any(split[name] and (padded[name] or not layouts[name].is_page_splittable) for name in layouts):
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
            try:
                attention_spans(layer.kv_heads, side.tp, 0)
            except ConfigError as error:
                yield _mismatch(
                    "tp",
                    told,
                    str(error),
                    "choose a tensor_parallel_size that divides the KV heads or is a multiple of them",
                    layer.name,
                )


def _mismatch(field: str, values: Mapping[str, str], effect: str, remedy: str, layer: str | None = None) -> Mismatch:
    return Mismatch(field, values["producer"], values["consumer"], Severity.REFUSE, effect, remedy, layer)


def _is_split(case: Case, side: Side) -> bool:
    return any(side.kernel_block_size_of(group) < side.block_size_of(group) for group in case.groups)


def _kernel_blocks(case: Case, side: Side) -> str:
    sizes = ", ".join(f"{side.kernel_block_size_of(group)} of {side.block_size_of(group)}" for group in case.groups)
    return f"{sizes} tokens in {side.layout}" + (", padded" if side.page_size_padded is not None else "")
