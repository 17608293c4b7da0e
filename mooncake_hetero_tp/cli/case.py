"""The input of `mooncake-hetero-tp plan`: one case, checked in full before anything is planned with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from mooncake_hetero_tp.cli.layers import LAYER_KINDS, Layer, StateLayer, WindowLayer, is_state, state_sizes
from mooncake_hetero_tp.cli.limits import (
    DTYPE_BYTES,
    MAX_CACHE_BYTES,
    MAX_PAGE_PLACES,
    MAX_RANKS,
    MAX_STATE_VALUES,
    Count,
    Index,
    Parallel,
    PerGroup,
    SideName,
)
from mooncake_hetero_tp.core.layout import KVLayout
from mooncake_hetero_tp.core.regions import STATE
from mooncake_hetero_tp.core.state_tensors import ConvLayout
from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.types import TokenRange


class InvalidCase(Exception):
    """A case that does not describe a pull; `str()` gives every reason found."""


class Side(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine. Sizes in tokens; `page_size_padded` in bytes, for all groups or for each (null: not padded)."""

    tp: Parallel
    pp: Parallel = 1
    layout: str
    block_size: PerGroup
    num_blocks: Count
    kernel_block_size: PerGroup | None = None
    page_size_padded: Count | list[Count | None] | None = None
    conv_layout: ConvLayout | None = None
    """Of this engine's states; None: as the layer says."""

    def block_size_of(self, group: int) -> int:
        return _of_group(self.block_size, group)

    def kernel_block_size_of(self, group: int) -> int:
        return _of_group(self.block_size if self.kernel_block_size is None else self.kernel_block_size, group)

    def page_size_of(self, group: int) -> int | None:
        """Bytes that each (layer, block) page of the group is padded to."""
        return self.page_size_padded[group] if isinstance(self.page_size_padded, list) else self.page_size_padded


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pull: tokens `[skip_tokens, tokens)` and where they lie; block lists are per group."""

    tokens: Index
    skip_tokens: Index = 0
    producer_blocks: list[list[Index]]
    consumer_blocks: list[list[Index]]


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A producer, a consumer and the model they share."""

    producer: Side
    consumer: Side
    dtype: str
    layers: list[Layer]
    request: Request | None = None

    @property
    def sides(self) -> dict[SideName, Side]:
        return {"producer": self.producer, "consumer": self.consumer}

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def groups(self) -> range:
        """KV cache groups: as many as the settings list or the layers name."""
        listed = [len(sizes) for _, sizes in self.listed_sizes()]
        return range(max([*listed, *(layer.group + 1 for layer in self.layers)]))

    def in_group(self, group: int) -> list[Layer]:
        return [layer for layer in self.layers if layer.group == group]

    def is_state(self, group: int) -> bool:
        """Whether the group's blocks are slots of states."""
        return any(is_state(layer) for layer in self.in_group(group))

    def kind_of(self, group: int) -> str:
        """The kind of the group's layers, `attention` where they are of several."""
        kinds = {layer.kind for layer in self.in_group(group)}
        return STATE if self.is_state(group) else kinds.pop() if len(kinds) == 1 else "attention"

    def tokens_read(self, group: int, tokens: TokenRange) -> TokenRange:
        """Those of `tokens` that the next token still reads; a window reaches back as far as it is long."""
        windows = [layer.window if isinstance(layer, WindowLayer) else None for layer in self.in_group(group)]
        if not windows or None in windows:
            return tokens
        first = max(tokens.end - max(window or 0 for window in windows) + 1, tokens.start)
        return TokenRange(min(first, tokens.end), tokens.end)

    def pages_read(self, side: Side, group: int) -> range:
        """Pages of the request, counted from its first, that are looked at; none without a request."""
        if self.request is None or not self.in_group(group):
            return range(0)
        read = self.tokens_read(group, TokenRange(self.request.skip_tokens, self.request.tokens))
        size = side.block_size_of(group)
        end = -(-read.end // size)
        if not read.count:
            return range(0)
        return range(end - 1 if self.is_state(group) else read.start // size, end)

    def listed_sizes(self) -> Iterator[tuple[str, list[Any]]]:
        """Sizes that are given as a list, with their names."""
        for name, side in self.sides.items():
            for field in ("block_size", "kernel_block_size", "page_size_padded"):
                if isinstance(sizes := getattr(side, field), list):
                    yield f"{name}.{field}", sizes


class _Raw(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A case whose layers are not looked at yet."""

    producer: Side
    consumer: Side
    dtype: str
    layers: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    request: Request | None = None


def read_case(given: object) -> Case:
    """The case that a decoded JSON value describes.

    Raises:
        InvalidCase: with every reason found.
    """
    try:
        raw = msgspec.convert(given, _Raw)
        layers = [_read_layer(layer, place) for place, layer in enumerate(raw.layers)]
    except msgspec.ValidationError as error:
        raise InvalidCase(str(error)) from error
    case = Case(producer=raw.producer, consumer=raw.consumer, dtype=raw.dtype, layers=layers, request=raw.request)
    if reasons := [*_wrong_names(case), *_wrong_sizes(case)]:
        raise InvalidCase("; ".join(reasons))
    if reasons := [*_wrong_request(case)]:
        raise InvalidCase("; ".join(reasons))
    return case


def _read_layer(given: Mapping[str, Any], place: int) -> Layer:
    kind = given.get("kind")
    record = LAYER_KINDS.get(kind) if isinstance(kind, str) else None
    if record is None:
        known = ", ".join(LAYER_KINDS)
        raise InvalidCase(f"$.layers[{place}].kind is {kind!r}; kinds that can be planned: {known}")
    try:
        return msgspec.convert(given, record)
    except msgspec.ValidationError as error:
        raise InvalidCase(f"$.layers[{place}]: {error}") from error


def _of_group(sizes: int | list[int], group: int) -> int:
    return sizes[group] if isinstance(sizes, list) else sizes


def _wrong_names(case: Case) -> Iterator[str]:
    for dtype in dict.fromkeys((case.dtype, *_state_dtypes(case))):
        if dtype not in DTYPE_BYTES:
            yield f"dtype {dtype!r} is unknown; known: {', '.join(DTYPE_BYTES)}"
    for name, side in case.sides.items():
        try:
            KVLayout.from_name(side.layout)
        except ConfigError as error:
            yield f"{name}: {error}"
    seen: set[str] = set()
    for layer in case.layers:
        if layer.name in seen:
            yield f"layer name {layer.name!r} occurs twice; layers are paired by name"
        seen.add(layer.name)


def _state_dtypes(case: Case) -> Iterator[str]:
    for layer in case.layers:
        if isinstance(layer, StateLayer):
            yield from filter(None, (layer.conv_dtype, layer.state_dtype))


def _wrong_sizes(case: Case) -> Iterator[str]:
    groups = len(case.groups)
    if wrong := [
        f"{name} lists {len(sizes)} groups, there are {groups}"
        for name, sizes in case.listed_sizes()
        if len(sizes) != groups
    ]:
        yield from wrong
        return
    for group in case.groups:
        if len({is_state(layer) for layer in case.in_group(group)}) > 1:
            yield f"group {group} has layers with and without a token axis; give states a group of their own"
    for name, side in case.sides.items():
        yield from (f"{name}: {why}" for why in (*_wrong_blocks(case, side), *_too_large(case, side)))


def _wrong_blocks(case: Case, side: Side) -> Iterator[str]:
    for group in case.groups:
        block, kernel = side.block_size_of(group), side.kernel_block_size_of(group)
        if block % kernel and not case.is_state(group):
            yield f"kernel_block_size {kernel} does not divide block_size {block} of group {group}"


def _too_large(case: Case, side: Side) -> Iterator[str]:
    if side.tp * side.pp > MAX_RANKS:
        yield f"tp {side.tp} x pp {side.pp} is more than {MAX_RANKS} ranks"
    for layer in case.layers:
        if isinstance(layer, StateLayer):
            values, _ = state_sizes(layer, case.dtype)
            if values > MAX_STATE_VALUES:
                yield f"a state of {values} values is longer than {MAX_STATE_VALUES}"
        elif layer.units * side.block_size_of(layer.group) > MAX_PAGE_PLACES:
            page = f"{layer.units} heads x {side.block_size_of(layer.group)} tokens"
            yield f"a page of {page} holds more than {MAX_PAGE_PLACES} places"
    if _cache_bytes(case, side) > MAX_CACHE_BYTES:
        yield f"the cache of one rank is longer than {MAX_CACHE_BYTES} bytes"


def _cache_bytes(case: Case, side: Side) -> int:
    """An upper bound: all heads on one rank, all pages padded."""
    pages = [max(_page_bytes(case, side, layer), side.page_size_of(layer.group) or 0) for layer in case.layers]
    return sum(pages) * side.num_blocks


def _page_bytes(case: Case, side: Side, layer: Layer) -> int:
    if isinstance(layer, StateLayer):
        return state_sizes(layer, case.dtype)[1]
    return layer.token_bytes(case.dtype) * side.block_size_of(layer.group)


def _wrong_request(case: Case) -> Iterator[str]:
    request = case.request
    if request is None:
        return
    if request.skip_tokens > request.tokens:
        yield f"request: skip_tokens {request.skip_tokens} is more than tokens {request.tokens}"
        return
    for name, side, lists, skip in (
        ("producer_blocks", case.producer, request.producer_blocks, 0),
        ("consumer_blocks", case.consumer, request.consumer_blocks, request.skip_tokens),
    ):
        if len(lists) != len(case.groups):
            yield f"request: {name} has {len(lists)} lists, there are {len(case.groups)} groups"
            continue
        for group, blocks in enumerate(lists):
            needed = max(case.pages_read(side, group).stop - skip // side.block_size_of(group), 0)
            yield from (f"request: {name}[{group}] {why}" for why in _wrong_list(side, group, blocks, needed))
    for group, blocks in enumerate(request.consumer_blocks[: len(case.groups)]):
        if repeated := [block for block, count in Counter(_written(case, group, blocks)).items() if count > 1]:
            yield f"request: consumer_blocks[{group}] holds block {repeated[0]} twice; each page needs its own"


def _written(case: Case, group: int, blocks: Sequence[int]) -> Sequence[int]:
    """Blocks that must differ: all, but for place-holders of pages that a state or a window leaves unread."""
    if case.request is None or case.kind_of(group) not in {STATE, "sliding_window"}:
        return blocks
    skipped = case.request.skip_tokens // case.consumer.block_size_of(group)
    pages = case.pages_read(case.consumer, group)
    return blocks[max(pages.start - skipped, 0) : max(pages.stop - skipped, 0)]


def _wrong_list(side: Side, group: int, blocks: Sequence[int], needed: int) -> Iterator[str]:
    if outside := [block for block in blocks if block >= side.num_blocks]:
        yield f"holds block {outside[0]}, num_blocks is {side.num_blocks}"
    if len(blocks) < needed:
        yield f"holds {len(blocks)} blocks, the range needs {needed} of {side.block_size_of(group)} tokens"
