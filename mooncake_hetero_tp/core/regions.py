"""What one layer's component looks like inside one rank's memory.

A `Region` is a strided array over (page, unit, token, channel). Its strides are byte-true for the
*content*, not for the tensor view vLLM hands over: the encoding (see `vllm_adapter/probe.py`)
decides them. Every layout, packed row, overlay of groups and kernel-block split is this one record.
"""

from __future__ import annotations

import msgspec


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
    `item_bytes` long. `token.count` is the tokens of one *kernel* page, `num_blocks` the number of
    kernel pages. Padding is whatever these elements do not cover; it is never written.
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


class Group(msgspec.Struct, frozen=True):
    """One KV cache group: whose block ids apply, and how many tokens a logical block holds."""

    index: int
    kind: str
    block_size: int
    kernel_block_size: int


class Buffer(msgspec.Struct, frozen=True):
    """One real allocation, registered once with the transfer engine."""

    address: int
    length_bytes: int


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
