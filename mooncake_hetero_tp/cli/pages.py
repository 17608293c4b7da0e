"""How a page of one layer would look on another engine with the same attention backend.

A producer's regions say where one page's bytes lie; an engine with other sizes lays the same content out for
its own heads, tokens and layout. What the content of a page is follows from the strides alone, apart from
pages of unknown inner order, of which only slots that the backend published can be laid out anew:

    model       a head's page                            where
    per token   one content of C bytes for each token    K and V side by side in it, latent rows, whole opaque slots
    planes      one [N][D] or [D][N] matrix a component  CPU attention: K transposed over the page, then V
    slots       head slots that are no KV heads          backends with slots of their own: B12X, opaque ones
    sides       data, scales of K, then of V             NVFP4: dense, heads outermost or innermost in each
    state       no tokens: components back to back       state-space and linear-attention slots
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from mooncake_hetero_tp.core.regions import Axis, Region

SLOT: Final = "slot"
"""Component names of opaque slots begin with it (`vllm_adapter/encodings.py`)."""
SLOTS: Final = "slots"
"""The encoding whose two slots are K and V."""
SIDES: Final = ".nvfp4"
"""Encodings with data and scales apart end with it (`vllm_adapter/scales.py`)."""


class Part(NamedTuple):
    """One component of a layer on the producer, and how many units the other engine's rank would hold."""

    like: Region
    offset: int
    """Bytes from the layer's first component."""
    units: int


class Placed(NamedTuple):
    """Where a component lies in a page: offset and axes, in bytes."""

    offset: int
    unit: Axis
    token: Axis
    channel: Axis


class Page(Protocol):
    """One layer's page in terms of the layout's dims."""

    @property
    def heads(self) -> int:
        """Entries of H."""

    @property
    def content_bytes(self) -> int:
        """Bytes of C."""

    def place(self, tokens: int, step: Mapping[str, int]) -> Iterator[Placed]:
        """The components, in order, in a page of `tokens` tokens whose dims have these byte strides."""


def page_of(parts: Sequence[Part], *, state: bool) -> Page:
    """The model that the producer's strides show; `parts` in order of offset."""
    if state:
        return StatePage(parts)
    like = parts[0].like
    if like.encoding == SLOTS or (like.is_opaque and like.component.startswith(SLOT)):
        return SlotPage(parts)
    if like.encoding.endswith(SIDES):
        return SidePage(parts)
    return TokenPage(parts) if all(_inside_token(part) for part in parts) else PlanePage(parts)


def needs_dense_head(page: Page) -> bool:
    """Whether a head's tokens must lie together: the layout's N comes right before C."""
    return isinstance(page, PlanePage)


def _inside_token(part: Part) -> bool:
    """Whether the component ends before the next token begins."""
    return part.like.token.count == 1 or part.offset + _row_extent(part.like) <= part.like.token.stride


def _row_extent(region: Region) -> int:
    return (region.channel.count - 1) * region.channel.stride + region.item_bytes


def _row_bytes(region: Region) -> int:
    return region.channel.count * region.item_bytes


class TokenPage(NamedTuple):
    """`H` heads, each token of which has all components side by side."""

    parts: Sequence[Part]

    @property
    def heads(self) -> int:
        return max(part.units for part in self.parts)

    @property
    def content_bytes(self) -> int:
        return max(part.offset + _row_extent(part.like) for part in self.parts)

    def place(self, tokens: int, step: Mapping[str, int]) -> Iterator[Placed]:
        for part in self.parts:
            yield Placed(part.offset, Axis(part.units, step["H"]), Axis(tokens, step["N"]), part.like.channel)


class PlanePage(NamedTuple):
    """`H` heads, each of which has one matrix a component, one after the other."""

    parts: Sequence[Part]

    @property
    def heads(self) -> int:
        return max(part.units for part in self.parts)

    @property
    def content_bytes(self) -> int:
        return sum(_row_bytes(part.like) for part in self.parts)

    def place(self, tokens: int, step: Mapping[str, int]) -> Iterator[Placed]:
        offset = 0
        for part in self.parts:
            row, item = _row_bytes(part.like), part.like.item_bytes
            transposed = part.like.token.stride < part.like.channel.stride
            token_step, channel_step = (item, tokens * item) if transposed else (row, item)
            unit, token = Axis(part.units, step["H"]), Axis(tokens, token_step)
            yield Placed(offset, unit, token, Axis(part.like.channel.count, channel_step))
            offset += tokens * row


class SlotPage(NamedTuple):
    """One H a component; the heads lie inside a token's content."""

    parts: Sequence[Part]

    @property
    def heads(self) -> int:
        return len(self.parts)

    @property
    def content_bytes(self) -> int:
        return self.parts[0].units * _row_bytes(self.parts[0].like)

    def place(self, tokens: int, step: Mapping[str, int]) -> Iterator[Placed]:
        for slot, part in enumerate(self.parts):
            unit = Axis(part.units, _row_bytes(part.like))
            yield Placed(slot * step["H"], unit, Axis(tokens, step["N"]), part.like.channel)


class SidePage(NamedTuple):
    """Two H a head; K's data, K's scales, V's data, V's scales fill them one after the other."""

    parts: Sequence[Part]

    @property
    def heads(self) -> int:
        return 2 * self.parts[0].units

    @property
    def content_bytes(self) -> int:
        return sum(_row_bytes(part.like) for part in self.parts) // 2

    def place(self, tokens: int, step: Mapping[str, int]) -> Iterator[Placed]:
        offset = 0
        for part in self.parts:
            row = _row_bytes(part.like)
            unit, token = (tokens * row, row) if step["H"] > step["N"] else (row, part.units * row)
            yield Placed(offset, Axis(part.units, unit), Axis(tokens, token), part.like.channel)
            offset += part.units * tokens * row


class StatePage(NamedTuple):
    """No heads and tokens of the layout: components back to back, each dense in the producer's own order of axes."""

    parts: Sequence[Part]

    @property
    def heads(self) -> int:
        return 1

    @property
    def content_bytes(self) -> int:
        return sum(part.units * part.like.token.count * _row_bytes(part.like) for part in self.parts)

    def place(self, tokens: int, step: Mapping[str, int]) -> Iterator[Placed]:  # noqa: ARG002 - Page's signature
        offset = 0
        for part in self.parts:
            axes, length = _dense(part)
            yield Placed(offset, *axes)
            offset += length


def _dense(part: Part) -> tuple[tuple[Axis, Axis, Axis], int]:
    """Unit, token and channel axes without gaps, nested as on the producer; and all their bytes."""
    like = part.like
    counts = (part.units, like.token.count, like.channel.count)
    axes = (like.unit, like.token, like.channel)
    nested = sorted(range(3), key=lambda axis: (axes[axis].count == 1, axes[axis].stride))
    steps, length = [0, 0, 0], like.item_bytes
    for axis in nested:
        steps[axis], length = length, length * counts[axis]
    unit, token, channel = (Axis(count, step) for count, step in zip(counts, steps, strict=True))
    return (unit, token, channel), length
