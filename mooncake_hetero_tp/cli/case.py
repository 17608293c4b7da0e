"""The input of `mooncake-hetero-tp plan`: one case, checked in full before anything is planned with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from mooncake_hetero_tp.core.layout import KVLayout
from mooncake_hetero_tp.errors import ConfigError

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4, "float": 4,
    "bfloat16": 2, "float16": 2, "half": 2,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int8": 1, "uint8": 1,
}  # fmt: skip
"""Bytes of one value, under the names of vLLM's `--dtype` and `--kv-cache-dtype` and of torch."""

MAX_RANKS = 256
MAX_SIZE = 1 << 32
"""Far above any engine; keeps every offset inside 64 bits."""
MAX_CACHE_BYTES = 1 << 52
MAX_PAGE_PLACES = 1 << 22
"""Places (heads x tokens) of one page; the proof of a plan looks at each."""

Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)]
Index = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]
Parallel = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
GroupIndex = Annotated[int, msgspec.Meta(ge=0, le=1023)]
PerGroup = Count | list[Count]
SideName = Literal["producer", "consumer"]
Name = Annotated[str, msgspec.Meta(min_length=1)]


class InvalidCase(Exception):
    """A case that does not describe a pull; `str()` gives every reason found."""


class Side(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine. Sizes in tokens; `page_size_padded` in bytes."""

    tp: Parallel
    pp: Parallel = 1
    layout: str
    block_size: PerGroup
    num_blocks: Count
    kernel_block_size: PerGroup | None = None
    page_size_padded: Count | None = None

    def block_size_of(self, group: int) -> int:
        return _of_group(self.block_size, group)

    def kernel_block_size_of(self, group: int) -> int:
        return _of_group(self.block_size if self.kernel_block_size is None else self.kernel_block_size, group)


class AttentionLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A layer that keeps K and V of `kv_heads` heads (of the whole model) per token."""

    name: Name
    kind: Literal["attention"]
    kv_heads: Count
    head_size: Count
    group: GroupIndex = 0


LAYER_KINDS: Mapping[str, type[AttentionLayer]] = {"attention": AttentionLayer}
"""Kinds of layers that can be planned, and the record each is read into."""


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
    layers: list[AttentionLayer]
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

    def listed_sizes(self) -> Iterator[tuple[str, list[int]]]:
        """Sizes that are given as a list, with their names."""
        for name, side in self.sides.items():
            for field in ("block_size", "kernel_block_size"):
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


def _read_layer(given: Mapping[str, Any], place: int) -> AttentionLayer:
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
    if case.dtype not in DTYPE_BYTES:
        yield f"dtype {case.dtype!r} is unknown; known: {', '.join(DTYPE_BYTES)}"
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


def _wrong_sizes(case: Case) -> Iterator[str]:
    groups = len(case.groups)
    if wrong := [
        f"{name} lists {len(sizes)} groups, there are {groups}"
        for name, sizes in case.listed_sizes()
        if len(sizes) != groups
    ]:
        yield from wrong
        return
    for name, side in case.sides.items():
        yield from (f"{name}: {why}" for why in (*_wrong_blocks(case, side), *_too_large(case, side)))


def _wrong_blocks(case: Case, side: Side) -> Iterator[str]:
    for group in case.groups:
        block, kernel = side.block_size_of(group), side.kernel_block_size_of(group)
        if block % kernel:
            yield f"kernel_block_size {kernel} does not divide block_size {block} of group {group}"


def _too_large(case: Case, side: Side) -> Iterator[str]:
    if side.tp * side.pp > MAX_RANKS:
        yield f"tp {side.tp} x pp {side.pp} is more than {MAX_RANKS} ranks"
    for layer in case.layers:
        tokens = side.block_size_of(layer.group)
        if layer.kv_heads * tokens > MAX_PAGE_PLACES:
            yield f"a page of {layer.kv_heads} heads x {tokens} tokens holds more than {MAX_PAGE_PLACES} places"
    if _cache_bytes(case, side) > MAX_CACHE_BYTES:
        yield f"the cache of one rank is longer than {MAX_CACHE_BYTES} bytes"


def _cache_bytes(case: Case, side: Side) -> int:
    """An upper bound: all heads on one rank, all pages padded."""
    item = DTYPE_BYTES.get(case.dtype, 1)
    pages = [
        max(layer.kv_heads * side.block_size_of(layer.group) * 2 * layer.head_size * item, side.page_size_padded or 0)
        for layer in case.layers
    ]
    return sum(pages) * side.num_blocks


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
            needed = pages_needed(case, side, group) - skip // side.block_size_of(group)
            yield from (f"request: {name}[{group}] {why}" for why in _wrong_list(side, group, blocks, needed))
    for group, blocks in enumerate(request.consumer_blocks):
        if repeated := [block for block, count in Counter(blocks).items() if count > 1]:
            yield f"request: consumer_blocks[{group}] holds block {repeated[0]} twice; each page needs its own"


def _wrong_list(side: Side, group: int, blocks: Sequence[int], needed: int) -> Iterator[str]:
    if outside := [block for block in blocks if block >= side.num_blocks]:
        yield f"holds block {outside[0]}, num_blocks is {side.num_blocks}"
    if len(blocks) < needed:
        yield f"holds {len(blocks)} blocks, the range needs {needed} of {side.block_size_of(group)} tokens"


def pages_needed(case: Case, side: Side, group: int) -> int:
    """Pages from the request's first to the last one that the range touches; 0 where it touches none."""
    request = case.request
    if request is None or request.skip_tokens == request.tokens or all(layer.group != group for layer in case.layers):
        return 0
    return -(-request.tokens // side.block_size_of(group))
