"""State of Mamba, linear-attention and short-convolution layers: what a slot holds and how TP cuts it.

A slot is a few tensors back to back. TP cuts each along one axis: heads, or channels where there are no heads. A
convolution's state is several projections side by side ([q, k, v] or [x, B, C]), and each of them is cut by itself:
one cut through all of them together crosses their borders (vllm#53078, sglang#20655). A projection with fewer groups
than ranks is held by several of them, by the same rule as KV heads are.

Nothing here knows vLLM; `vllm_adapter/state_layers.py` compares what comes out with what vLLM allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate
from math import prod

import msgspec

from mooncake_hetero_tp.core.regions import Axis, Region, Span, attention_spans

_ENCODINGS = {"URC": "state", "UCR": "conv.ds", "RUC": "conv.sd"}
"""Names of the orders of `StateTensor`, for tables and reports."""


class ConvLayout(StrEnum):
    """Order of a convolution's state (`VLLM_SSM_CONV_STATE_LAYOUT`)."""

    DS = "DS"
    """Channels outermost: [channel][row]."""
    SD = "SD"
    """Rows outermost: [row][channel]."""


class StatePart(msgspec.Struct, frozen=True):
    """What TP cuts by itself: `units` of the whole model, each `channels` wide."""

    component: str
    units: int
    channels: int


class StateTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a layer's state: parts side by side, `rows` of each.

    `order` names the axes from the outermost: U unit (all parts' units one after the other), R row, C channel.
    `URC` is the state of heads, `UCR` a convolution in DS, `RUC` one in SD.
    """

    parts: tuple[StatePart, ...]
    rows: int
    order: str
    item_bytes: int
    dtype: str


class PlacedPart(msgspec.Struct, frozen=True, kw_only=True):
    """One component in a rank's slot: byte offset, what it holds, strided axes in bytes."""

    component: str
    offset: int
    spans: tuple[Span, ...]
    unit: Axis
    row: Axis
    channel: Axis
    item_bytes: int
    dtype: str
    order: str


def conv_tensor(parts: Sequence[StatePart], rows: int, layout: ConvLayout, item_bytes: int, dtype: str) -> StateTensor:
    """The last inputs of a causal convolution: `rows` is its kernel size - 1, plus drafted tokens."""
    order = "UCR" if layout is ConvLayout.DS else "RUC"
    return StateTensor(parts=tuple(parts), rows=rows, order=order, item_bytes=item_bytes, dtype=dtype)


def head_tensor(component: str, heads: int, inner: Sequence[int], item_bytes: int, dtype: str) -> StateTensor:
    """`heads` of the whole model, each an array of shape `inner`."""
    *rows, channels = inner or (1,)
    part = StatePart(component, heads, channels)
    return StateTensor(parts=(part,), rows=prod(rows), order="URC", item_bytes=item_bytes, dtype=dtype)


def qkv_parts(key_heads: int, value_heads: int, key_channels: int, value_channels: int) -> tuple[StatePart, ...]:
    """Projections before the convolution of gated delta net layers: queries and keys share heads and width."""
    return (
        StatePart("conv.q", key_heads, key_channels),
        StatePart("conv.k", key_heads, key_channels),
        StatePart("conv.v", value_heads, value_channels),
    )


def xbc_parts(heads: int, groups: int, head_channels: int, state_size: int) -> tuple[StatePart, ...]:
    """Projections before the convolution of Mamba2 layers; `groups` is the model's own number, not extended to TP."""
    return (
        StatePart("conv.x", heads, head_channels),
        StatePart("conv.B", groups, state_size),
        StatePart("conv.C", groups, state_size),
    )


def local_shape(tensor: StateTensor, tp_size: int, tp_rank: int) -> tuple[int, int, int]:
    """(channels of all parts' units, rows, bytes) that one rank holds.

    Raises:
        ConfigError: TP cannot cut the parts (`attention_spans`).
    """
    widths = _local_widths(tensor, tp_size, tp_rank)
    return sum(widths), tensor.rows, sum(widths) * tensor.rows * tensor.item_bytes


def place(tensors: Sequence[StateTensor], tp_size: int, tp_rank: int) -> tuple[PlacedPart, ...]:
    """Components of one rank's slot, tensors back to back from offset 0.

    Raises:
        ConfigError: TP cannot cut a part (`attention_spans`).
    """
    sizes = [local_shape(tensor, tp_size, tp_rank)[2] for tensor in tensors]
    starts = accumulate(sizes, initial=0)
    return tuple(
        part for tensor, start in zip(tensors, starts, strict=False) for part in _place(tensor, start, tp_size, tp_rank)
    )


class Slots(msgspec.Struct, frozen=True, kw_only=True):
    """The slots of one layer on one rank: where they lie, in bytes, and whose they are."""

    layer: str
    group: int
    base: int
    block_stride: int
    num_blocks: int

    def region(self, part: PlacedPart) -> Region:
        """A component of these slots."""
        return Region(
            layer=self.layer,
            component=part.component,
            group=self.group,
            base=self.base + part.offset,
            block_stride=self.block_stride,
            num_blocks=self.num_blocks,
            spans=part.spans,
            unit=part.unit,
            token=part.row,
            channel=part.channel,
            item_bytes=part.item_bytes,
            dtype=part.dtype,
            encoding=_ENCODINGS[part.order],
        )


def _place(tensor: StateTensor, start: int, tp_size: int, tp_rank: int) -> list[PlacedPart]:
    widths = _local_widths(tensor, tp_size, tp_rank)
    before = accumulate(widths, initial=0)
    item = tensor.item_bytes
    placed = []
    for part, skipped in zip(tensor.parts, before, strict=False):
        spans = _spans(part, tp_size, tp_rank)
        units = sum(span.count for span in spans)
        channel, row = _steps(tensor, part.channels, sum(widths))
        placed.append(
            PlacedPart(
                component=part.component,
                offset=start + skipped * item * (1 if tensor.order == "RUC" else tensor.rows),
                spans=spans,
                unit=Axis(units, part.channels * item * (1 if tensor.order == "RUC" else tensor.rows)),
                row=Axis(tensor.rows, row * item),
                channel=Axis(part.channels, channel * item),
                item_bytes=item,
                dtype=tensor.dtype,
                order=tensor.order,
            )
        )
    return placed


def _steps(tensor: StateTensor, channels: int, width: int) -> tuple[int, int]:
    """Elements between neighbouring channels, and between neighbouring rows."""
    return {"URC": (1, channels), "UCR": (tensor.rows, 1), "RUC": (1, width)}[tensor.order]


def _local_widths(tensor: StateTensor, tp_size: int, tp_rank: int) -> list[int]:
    return [part.channels * sum(span.count for span in _spans(part, tp_size, tp_rank)) for part in tensor.parts]


def _spans(part: StatePart, tp_size: int, tp_rank: int) -> tuple[Span, ...]:
    return attention_spans(part.units, tp_size, tp_rank, what=f"{part.component} units")
