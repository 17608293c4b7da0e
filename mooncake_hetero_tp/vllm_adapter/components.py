"""What an encoding is made from, the facts of one layer, and what it makes: the components of a page."""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_hetero_tp.core.regions import Axis

PLAIN_MODES = ("NONE", "FP8_PER_TENSOR")
"""`KVQuantMode`s whose pages hold one item a value and nothing else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageView:
    """One layer's view as vLLM hands it over; strides and sizes in bytes."""

    heads: int
    """H: head slots, which need not be KV heads."""
    tokens: int
    """N: tokens of one kernel page."""
    content_bytes: int
    """C."""
    head_stride: int
    token_stride: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFacts:
    """What vLLM's spec and backend say about one layer."""

    layer: str
    backend: str
    """`AttentionBackend.get_name()`."""
    isa: str | None
    """CPU_ATTN only: the instruction set whose kernels write the cache."""
    latent: bool
    """MLA: one unit, the same on every TP rank."""
    kv_heads: int
    """KV heads this rank holds."""
    head_size: int
    head_size_v: int
    item_bytes: int
    dtype: str
    """The KV cache dtype by vLLM's name: `fp8_e5m2` and `nvfp4` are both stored as bytes and mean other values."""
    own_slots: bool
    """The backend published its own H (`AttentionSpec.num_head_slots`): a slot is no KV head."""
    own_content: bool
    """The backend published its own C (`AttentionSpec.state_content_bytes`): more than K and V lie in it."""
    quantisation: str
    """`KVQuantMode`'s member name."""

    @property
    def plain_values(self) -> bool:
        """Unquantised, or FP8 with one scale a layer: one item is one value."""
        return self.quantisation in PLAIN_MODES


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One component of a page: offset from the page's start and three strided axes, in bytes."""

    name: str
    offset: int
    unit: Axis
    token: Axis
    channel: Axis
    item_bytes: int
    dtype: str | None = None
    """Of its items, where it is not the layer's."""
