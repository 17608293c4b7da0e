"""The decoder that `--as` describes, rebuilt from the region tables of all ranks of a producer.

Known from the producer: layers, components, global units, groups, model, and how its attention backend lays a
page out. The decoder runs the same model with the same backend; what was not asked otherwise is the
producer's. What only a running decoder could tell is listed as an assumption.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from mooncake_hetero_tp.cli.limits import DTYPE_BYTES, MAX_PAGE_PLACES
from mooncake_hetero_tp.cli.memory import stage_layers
from mooncake_hetero_tp.cli.pages import Page, Part, needs_dense_head, page_of
from mooncake_hetero_tp.cli.wish import Wish
from mooncake_hetero_tp.core.layout import KVLayout
from mooncake_hetero_tp.core.plan import collapse
from mooncake_hetero_tp.core.regions import Axis, Buffer, Group, RankTable, Region, Span, attention_spans, whole_span
from mooncake_hetero_tp.core.tables import validate_table
from mooncake_hetero_tp.errors import ConfigError, IncompatiblePeer, PeerProtocolError
from mooncake_hetero_tp.types import Mismatch, Rank, Severity

_CACHE_DTYPE = "kv_cache_dtype"
"""Field of `RankTable.model`."""
_LAYERS = "layers"
"""Field of `RankTable.model`: the model's hidden layers, those without a KV cache among them."""
_GAP = 1 << 12
"""Between two arrays, so that nothing is ever merged from one into the next."""


class Decoder(NamedTuple):
    """Region tables of all ranks, and what they take for granted."""

    tables: dict[Rank, RankTable]
    assumptions: list[str]


def build_decoder(producers: Mapping[Rank, RankTable], wish: Wish) -> Decoder:
    """The decoder that differs from the producer (all of its ranks, each valid) in what was asked.

    Raises:
        ConfigError: settings that contradict each other or the producer's groups.
        IncompatiblePeer: no engine can be laid out so, each reason with its remedy.
    """
    first = next(iter(producers.values()))
    if _has_dtype(first, wish.dtype):
        wish = msgspec.structs.replace(wish, dtype=None)
    layers = _layers(producers, wish.dtype)
    header = _header(first, layers, wish)
    if refused := [*_dtype_refusals(producers, wish.dtype)] or _refusals(first, header, layers):
        raise IncompatiblePeer("no decoder can be laid out so", collapse(refused))
    _check_sizes(header, layers)
    stages = _stages(header, layers)
    tables = {
        Rank(pp=pp, tp=tp): _rank_table(header, own, tp)
        for pp, own in enumerate(stages)
        for tp in range(header.tp_size)
    }
    for rank, table in tables.items():
        try:
            validate_table(table)
        except PeerProtocolError as error:
            raise ConfigError(f"--as: rank {rank} of such a decoder cannot be described: {error}") from error
    return Decoder(tables, [*_assumptions(first, header, layers)])


# --- what the producer shows -----------------------------------------------------------------------------------------


class _Component(NamedTuple):
    """A component of one layer, as one producer rank has it, and its units over all of them."""

    like: Region
    offset: int
    """Bytes from the layer's first component."""
    units: int
    whole: bool
    """Every rank holds all units, whatever the TP size."""

    def spans(self, tp_size: int, tp_rank: int) -> tuple[Span, ...]:
        """Raises ConfigError for a TP size that vLLM refuses too."""
        return whole_span(self.units) if self.whole else attention_spans(self.units, tp_size, tp_rank)

    def part(self, tp_size: int, tp_rank: int) -> Part:
        return Part(self.like, self.offset, sum(span.count for span in self.spans(tp_size, tp_rank)))


class _Layer(NamedTuple):
    """One layer; components in order of their addresses."""

    name: str
    group: Group
    components: tuple[_Component, ...]

    @property
    def encoding(self) -> str:
        return self.components[0].like.encoding

    def page(self, tp_size: int, tp_rank: int) -> Page:
        parts = [component.part(tp_size, tp_rank) for component in self.components]
        return page_of(parts, state=self.group.is_state)


def _layers(producers: Mapping[Rank, RankTable], dtype: str | None) -> list[_Layer]:
    """All layers, in the order of the producer's stages."""
    held: dict[str, dict[str, list[Region]]] = {}
    groups: dict[str, Group] = {}
    tp_sizes: dict[str, int] = {}
    for _, table in sorted(producers.items()):
        for region in table.regions:
            held.setdefault(region.layer, {}).setdefault(region.component, []).append(region)
            groups[region.layer], tp_sizes[region.layer] = table.groups[region.group], table.tp_size
    return [
        _Layer(name, group := groups[name], tuple(_components([*parts.values()], tp_sizes[name], group, dtype)))
        for name, parts in held.items()
    ]


def _components(
    parts: Sequence[Sequence[Region]], tp_size: int, group: Group, dtype: str | None
) -> Iterator[_Component]:
    """One for each list of a component's regions on all ranks."""
    ordered = sorted(parts, key=lambda replicas: replicas[0].base)
    start = ordered[0][0].base
    for replicas in ordered:
        like = msgspec.structs.replace(replicas[0], base=replicas[0].base - start)
        if dtype is not None and not group.is_state:  # states have a dtype setting of their own
            like = _typed(like, dtype)
        units = max(span.global_start + span.count for region in replicas for span in region.spans)
        whole = tp_size > 1 and all(region.unit.count == units for region in replicas)
        yield _Component(like, like.base, units, whole)


def _has_dtype(table: RankTable, dtype: str | None) -> bool:
    """Whether the KV cache is of this dtype, by the setting's name or by the regions'."""
    paged = {region.dtype for region in table.regions if not table.groups[region.group].is_state}
    return dtype == table.model.get(_CACHE_DTYPE) or paged == {dtype}


def _typed(region: Region, dtype: str) -> Region:
    """The region with items of another type: as many of them, all distances in proportion."""
    old, new = region.item_bytes, DTYPE_BYTES[dtype]

    def scaled(axis: Axis) -> Axis:
        return Axis(axis.count, axis.stride * new // old)

    return msgspec.structs.replace(
        region,
        base=region.base * new // old,
        unit=scaled(region.unit),
        token=scaled(region.token),
        channel=scaled(region.channel),
        item_bytes=new,
        dtype=dtype,
    )


# --- the decoder's settings ------------------------------------------------------------------------------------------


def _header(first: RankTable, layers: Sequence[_Layer], wish: Wish) -> RankTable:
    """The decoder's table without regions.

    Raises:
        ConfigError: block sizes that do not fit the groups or each other.
    """
    groups = {group.index: group for group in first.groups} | {layer.group.index: layer.group for layer in layers}
    for name, sizes in (("block_size", wish.block_size), ("kernel_block_size", wish.kernel_block_size)):
        if sizes and len(sizes) not in (1, len(groups)):
            raise ConfigError(f"--as: {name} lists {len(sizes)} groups, the producer has {len(groups)}")
    named = {_CACHE_DTYPE: wish.dtype} if wish.dtype and _CACHE_DTYPE in first.model else {}
    return msgspec.structs.replace(
        first,
        tp_size=wish.tp or first.tp_size,
        pp_size=wish.pp or first.pp_size,
        layout=wish.layout or first.layout,
        model=first.model | named,
        groups=tuple(_group(groups[index], wish) for index in sorted(groups)),
        regions=(),
        buffers=(),
    )


def _check_sizes(header: RankTable, layers: Sequence[_Layer]) -> None:
    """Bounds what the proof of a plan looks at; raises ConfigError."""
    for layer in layers:
        tokens = header.groups[layer.group.index].block_size
        heads = max(component.units for component in layer.components)
        if not layer.group.is_state and tokens * heads > MAX_PAGE_PLACES:
            raise ConfigError(f"--as: a page of {heads} heads x {tokens} tokens; expected at most {MAX_PAGE_PLACES}")


def _group(group: Group, wish: Wish) -> Group:
    if group.is_state:  # its block is no number of tokens that a page holds
        return group
    logical = _size_of(wish.block_size, group) or group.block_size
    split = group.kernel_block_size < group.block_size
    kernel = _size_of(wish.kernel_block_size, group) or (group.kernel_block_size if split else logical)
    if logical % kernel:
        whose = "" if wish.kernel_block_size else " (the producer's)"
        raise ConfigError(
            f"--as: kernel_block_size {kernel}{whose} does not divide block_size {logical} of group {group.index}; "
            "name one that does"
        )
    return msgspec.structs.replace(group, block_size=logical, kernel_block_size=kernel)


def _size_of(sizes: tuple[int, ...] | None, group: Group) -> int | None:
    return None if sizes is None else sizes[group.index if len(sizes) > 1 else 0]


def _stages(header: RankTable, layers: Sequence[_Layer]) -> list[list[_Layer]]:
    """The layers of each pipeline stage, cut as vLLM cuts the model's hidden layers.

    Layers are counted by the number in their name where the model says how many there are, for some have no
    KV cache; a draft model's, which count on, go to the last stage. Otherwise the list is cut.

    Raises:
        ConfigError: a stage would have no KV cache layer, which the connector refuses.
    """
    numbers = [_number_in(layer.name) for layer in layers]
    total = header.model.get(_LAYERS, "")
    numbered = total.isdecimal() and None not in numbers
    stages = stage_layers(int(total) if numbered else len(layers), header.pp_size)
    places = [number or 0 for number in numbers] if numbered else [*range(len(layers))]
    last = stages[-1].stop - 1
    cut = [
        [layer for layer, place in zip(layers, places, strict=True) if min(place, last) in stage] for stage in stages
    ]
    if [] in cut:
        raise ConfigError(f"--as: pp={header.pp_size} leaves stage {cut.index([])} without a KV cache layer")
    return cut


def _number_in(name: str) -> int | None:
    """`model.layers.7.self_attn.attn` -> 7."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


# --- its memory ------------------------------------------------------------------------------------------------------


def _rank_table(header: RankTable, layers: Sequence[_Layer], tp_rank: int) -> RankTable:
    """One rank's memory: a dense array, in the layout's order, for all layers whose pages are alike."""
    alike: dict[tuple[int, ...], list[_Layer]] = {}
    for layer in layers:
        alike.setdefault(_shape(header, layer, tp_rank), []).append(layer)
    layout = KVLayout.from_name(header.layout)
    regions: dict[str, list[Region]] = {}
    buffers: list[Buffer] = []
    for shape, members in alike.items():
        counts = dict(zip("LBHNC", (len(members), *shape), strict=True))
        step = layout.strides(counts, 1)
        outermost = layout.order[0]
        start = -(-buffers[-1].end // _GAP) * _GAP + _GAP if buffers else _GAP
        buffers.append(Buffer(start, step[outermost] * counts[outermost]))
        for place, layer in enumerate(members):
            base = start + place * step["L"]
            regions[layer.name] = [*_regions(header, layer, tp_rank, counts, step, base)]
    return msgspec.structs.replace(
        header,
        regions=tuple(region for layer in layers for region in regions[layer.name]),
        buffers=tuple(buffers),
    )


def _shape(header: RankTable, layer: _Layer, tp_rank: int) -> tuple[int, int, int, int]:
    """Kernel pages, H, N and bytes of C; as many tokens in all as the producer has, as far as blocks allow."""
    group, page = header.groups[layer.group.index], layer.page(header.tp_size, tp_rank)
    like = layer.components[0].like
    if group.is_state:
        return like.num_blocks, page.heads, 1, page.content_bytes
    blocks = -(-like.num_blocks * like.token.count // group.block_size)
    return blocks * group.kernel_pages, page.heads, group.kernel_block_size, page.content_bytes


def _regions(
    header: RankTable, layer: _Layer, tp_rank: int, counts: Mapping[str, int], step: Mapping[str, int], base: int
) -> Iterator[Region]:
    placed = layer.page(header.tp_size, tp_rank).place(counts["N"], step)
    for component, where in zip(layer.components, placed, strict=True):
        yield msgspec.structs.replace(
            component.like,
            base=base + where.offset,
            block_stride=step["B"],
            num_blocks=counts["B"],
            spans=component.spans(header.tp_size, tp_rank),
            unit=where.unit,
            token=where.token,
            channel=where.channel,
        )


# --- what cannot be, and what is not known ---------------------------------------------------------------------------


def _refusals(first: RankTable, header: RankTable, layers: Sequence[_Layer]) -> list[Mismatch]:
    """Why no engine has such a memory; of a TP size that cannot be, nothing more can be said."""
    impossible = [*_tp_refusals(first, header, layers)]
    return impossible or [*_layout_refusals(first, header, layers)]


def _dtype_refusals(producers: Mapping[Rank, RankTable], dtype: str | None) -> Iterator[Mismatch]:
    """Pages that hold more than values of one known type: what lies in them for another type is not known."""
    if dtype is None:
        return
    for layer in _layers(producers, None):
        dtypes = dict.fromkeys(component.like.dtype for component in layer.components)
        if not layer.group.is_state and (len(dtypes) > 1 or layer.components[0].like.is_opaque):
            yield _mismatch(
                "dtype",
                (" and ".join(dtypes), dtype),
                f"the producer's pages ({layer.encoding}) hold more than values of one known type",
                "leave dtype out, or run the decode engine and probe it",
                layer.name,
            )


def _tp_refusals(first: RankTable, header: RankTable, layers: Sequence[_Layer]) -> Iterator[Mismatch]:
    for layer in layers:
        for component in layer.components:
            try:
                component.spans(header.tp_size, 0)
            except ConfigError as error:
                yield _mismatch(
                    "tp",
                    (f"TP{first.tp_size}", f"TP{header.tp_size}"),
                    str(error),
                    "choose a tensor_parallel_size that divides the KV heads or is a multiple of them",
                    component.like.name,
                )


def _layout_refusals(first: RankTable, header: RankTable, layers: Sequence[_Layer]) -> Iterator[Mismatch]:
    layout = KVLayout.from_name(header.layout)
    layouts = (first.layout, header.layout)
    if not layout.is_content_innermost:
        yield _mismatch(
            "layout",
            layouts,
            "the content of one head and token is not contiguous, which no backend reads",
            "use a layout that ends in C",
        )
        return
    if any(group.kernel_pages > 1 for group in header.groups) and not layout.is_page_splittable:
        yield _mismatch(
            "kernel_block_size",
            (_kernel_blocks(first), _kernel_blocks(header)),
            "a block that is not one dense page cannot be split into kernel blocks",
            "use LBHNC or LBNHC, or kernel_block_size = block_size",
        )
    for layer in layers:
        if needs_dense_head(layer.page(header.tp_size, 0)) and not header.layout.endswith("NC"):
            yield _mismatch(
                "layout",
                layouts,
                f"the producer's backend ({layer.encoding}) keeps all tokens of a head's page together",
                "use a layout that ends in NC",
                layer.name,
            )


def _kernel_blocks(table: RankTable) -> str:
    sizes = ", ".join(f"{group.kernel_block_size} of {group.block_size}" for group in table.groups)
    return f"{sizes} tokens in {table.layout}"


def _mismatch(field: str, values: tuple[str, str], effect: str, remedy: str, layer: str | None = None) -> Mismatch:
    return Mismatch(field, *values, Severity.REFUSE, effect, remedy, layer)


def _assumptions(first: RankTable, header: RankTable, layers: Sequence[_Layer]) -> Iterator[str]:
    """What the answer takes for granted, because only the decoder itself could tell."""
    encodings = ", ".join(dict.fromkeys(layer.encoding for layer in layers))
    yield f"the decoder runs the producer's model and attention backend, which lays pages out as {encodings}"
    if (header.layout, header.groups) != (first.layout, first.groups):
        yield "that backend takes the layout and the block sizes that were asked"
    if header.pp_size > 1:
        yield "pipeline stages are cut as vLLM does without VLLM_PP_LAYER_PARTITION"
    if first.tp_size == 1 < header.tp_size and any(layer.group.is_state for layer in layers):
        yield "states are shared evenly among tensor ranks; a producer at TP1 does not show which are replicated"
