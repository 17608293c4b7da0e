"""What one layer's component looks like inside one rank's memory.

A `Region` is a strided array over (page, unit, token, channel). Its strides are byte-true for the
*content*, not for the tensor view vLLM hands over: the encoding (see `vllm_adapter/probe.py`)
decides them. Every layout, packed row, overlay of groups and kernel-block split is this one record.

Checks of a whole table, own or a peer's, are in `core/tables.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final

import msgspec

from mooncake_hetero_tp.errors import ConfigError

OPAQUE: Final = "opaque"
"""Encoding name, alone or as `opaque:<backend>`, of pages whose inner order is not known."""

STATE: Final = "state"
"""`Group.kind` of state-space and linear-attention groups: one slot a request, no token axis."""


@lru_cache(maxsize=256)  # a peer names them
def _is_opaque(encoding: str) -> bool:
    return encoding.partition(":")[0] == OPAQUE


class Span(msgspec.Struct, frozen=True, order=True):
    """`count` consecutive global units, held locally from `local_start`."""

    local_start: int
    global_start: int
    count: int


class Axis(msgspec.Struct, frozen=True):
    """A strided axis: `count` steps of `stride` bytes."""

    count: int
    stride: int


class Region(msgspec.Struct, frozen=True):
    """One layer component on one rank.

    Element (page p, unit u, token t, channel c) starts at
    `base + p * block_stride + u * unit.stride + t * token.stride + c * channel.stride` and is
    `item_bytes` long. `token.count` is the tokens of one *kernel* page (the rows of one slot in a
    state group), `num_blocks` the number of kernel pages. Padding is whatever these elements do not
    cover; it is never written.
    """

    layer: str
    component: str
    group: int
    base: int
    block_stride: int
    num_blocks: int
    spans: tuple[Span, ...]
    unit: Axis
    token: Axis
    channel: Axis
    item_bytes: int
    dtype: str
    encoding: str

    @property
    def name(self) -> str:
        """`layer/component`, for messages."""
        return f"{self.layer}/{self.component}"

    @property
    def is_opaque(self) -> bool:
        """Whether only whole kernel pages of it may move, because their inner order is not known."""
        return _is_opaque(self.encoding)


class Group(msgspec.Struct, frozen=True):
    """One KV cache group: whose block ids apply, and how many tokens a logical block holds."""

    index: int
    kind: str
    block_size: int
    kernel_block_size: int

    @property
    def is_state(self) -> bool:
        """Whether one slot maps to one slot, without a token axis."""
        return self.kind == STATE

    @property
    def kernel_pages(self) -> int:
        """Kernel pages of one logical block: logical block b is kernel pages `b*r .. b*r + r - 1`."""
        return 1 if self.is_state else self.block_size // self.kernel_block_size


class Buffer(msgspec.Struct, frozen=True):
    """One real allocation, registered once with the transfer engine."""

    address: int
    length_bytes: int

    @property
    def end(self) -> int:
        return self.address + self.length_bytes


class RankTable(msgspec.Struct, frozen=True):
    """All that a peer must know about one rank's KV memory to plan a pull."""

    tp_size: int
    pp_size: int
    layout: str
    model: dict[str, str]
    """Fingerprint fields that must agree (name -> printable value), e.g. `kv_heads`, `head_size`."""
    groups: tuple[Group, ...]
    regions: tuple[Region, ...]
    buffers: tuple[Buffer, ...]
    dcp_size: int = 1
    """Decode context parallelism: TP ranks that take turns in holding a request's tokens."""
    pcp_size: int = 1
    """Prefill context parallelism: the same over ranks of their own."""
    draft_layers: tuple[str, ...] = ()
    """Layers of a draft model, which may be on one side only: they are then not loaded, and drafts start badly.
    Any other layer that one side lacks is refused."""
    declared_encodings: dict[str, str] = {}
    """Encodings that the operator declared (attention backend -> encoding); of one backend both sides say the same."""


class UnitCut(msgspec.Struct, frozen=True, order=True):
    """`count` global units from `global_start`, at these local places of the two sides."""

    global_start: int
    count: int
    consumer_local: int
    producer_local: int


def attention_spans(total_heads: int, tp_size: int, tp_rank: int, *, what: str = "KV heads") -> tuple[Span, ...]:
    """The heads that vLLM gives to one tensor rank: `head = rank * H // TP`, one head at least.

    `what` they are, for messages.

    Raises:
        ConfigError: TP neither divides the heads nor is divided by them, which vLLM refuses too
            (`ModelConfig.verify_with_parallel_config`, `get_num_kv_heads`), or a rank outside TP.
    """
    if total_heads < 1 or tp_size < 1 or not 0 <= tp_rank < tp_size:
        raise ConfigError(
            f"{what} {total_heads}, TP size {tp_size}, TP rank {tp_rank}: expected at least one head, "
            f"one rank and 0 <= rank < TP size; correct the case or the model configuration"
        )
    if total_heads % tp_size and tp_size % total_heads:
        raise ConfigError(
            f"TP size {tp_size} cannot share {total_heads} {what}: vLLM needs a TP size that divides the "
            f"{what} or is a multiple of them; choose another tensor_parallel_size"
        )
    return (Span(0, tp_rank * total_heads // tp_size, max(total_heads // tp_size, 1)),)


def whole_span(units: int) -> tuple[Span, ...]:
    """All units, as every rank of a replicated component (MLA latent, indexer) holds them."""
    return (Span(0, 0, units),)


def intersect(consumer: Iterable[Span], producer: Iterable[Span]) -> Iterator[UnitCut]:
    """The units both sides hold, as maximal cuts in the order of the consumer's spans."""
    held = tuple(producer)
    for want in consumer:
        for have in held:
            start = max(want.global_start, have.global_start)
            end = min(want.global_start + want.count, have.global_start + have.count)
            if start < end:
                yield UnitCut(
                    global_start=start,
                    count=end - start,
                    consumer_local=want.local_start + start - want.global_start,
                    producer_local=have.local_start + start - have.global_start,
                )


def unserved_drafts(consumer: RankTable, producers: Iterable[RankTable]) -> tuple[str, ...]:
    """The consumer's draft layers of which no producer rank holds anything; the others are loaded like any layer."""
    held = {region.layer for table in producers for region in table.regions}
    return tuple(layer for layer in consumer.draft_layers if layer not in held)


def page_extent(region: Region) -> int:
    """Bytes from the first to past the last element of one page."""
    axes = (region.unit, region.token, region.channel)
    return sum((axis.count - 1) * axis.stride for axis in axes) + region.item_bytes


def extent(region: Region) -> int:
    """Bytes from `base` to past the last element of the last page."""
    return (region.num_blocks - 1) * region.block_stride + page_extent(region)
