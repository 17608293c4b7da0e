"""Kinds of layers that a case may have, and what each keeps in a page.

Numbers of heads, groups and channels are those of the whole model; which of them a rank holds follows from TP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from mooncake_hetero_tp.cli.limits import DTYPE_BYTES, Count, GroupIndex, Name
from mooncake_hetero_tp.core.state_tensors import (
    ConvLayout,
    StateTensor,
    conv_tensor,
    head_tensor,
    qkv_parts,
    xbc_parts,
)

Kernel = Annotated[int, msgspec.Meta(ge=2, le=1024)]
Shared: TypeAlias = tuple[tuple[int, str], ...]
"""(how many, what): that the tensor ranks share out, for messages."""


class AttentionLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keeps K and V of `kv_heads` heads per token."""

    name: Name
    kind: Literal["attention"]
    kv_heads: Count
    head_size: Count
    group: GroupIndex = 0

    @property
    def component(self) -> str:
        return "kv"

    @property
    def units(self) -> int:
        return self.kv_heads

    @property
    def shared(self) -> Shared:
        return ((self.kv_heads, "KV heads"),)

    def token_bytes(self, dtype: str) -> int:
        """Of all heads."""
        return self.kv_heads * 2 * self.head_size * DTYPE_BYTES.get(dtype, 1)


class WindowLayer(AttentionLayer, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attention that reads the last `window` tokens, the one that is computed among them."""

    kind: Literal["sliding_window"]  # type: ignore[assignment]
    window: Count


class WholeLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keeps `bytes_per_token` on every tensor rank alike: MLA latents, indexer caches."""

    name: Name
    kind: Literal["mla", "replicated"]
    bytes_per_token: Count
    group: GroupIndex = 0

    @property
    def component(self) -> str:
        return {"mla": "latent", "replicated": "replicated"}[self.kind]

    @property
    def units(self) -> int:
        return 1

    @property
    def shared(self) -> Shared:
        return ()

    def token_bytes(self, dtype: str) -> int:  # noqa: ARG002 - as the other kinds
        """On each rank."""
        return self.bytes_per_token


class _StateLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keeps one state a request, whatever its length: a convolution's last inputs and a matrix a head."""

    name: Name
    conv_kernel: Kernel
    conv_layout: ConvLayout = ConvLayout.DS
    conv_dtype: str | None = None
    """Of the convolution's state; None: the case's."""
    state_dtype: str | None = None
    """Of the heads' state; None: the case's."""
    group: GroupIndex = 0

    def conv(self, parts: Any, layout: ConvLayout | None, dtype: str) -> StateTensor:
        of = self.conv_dtype or dtype
        return conv_tensor(parts, self.conv_kernel - 1, layout or self.conv_layout, DTYPE_BYTES.get(of, 1), of)

    def heads_state(self, heads: int, inner: tuple[int, int], dtype: str) -> StateTensor:
        of = self.state_dtype or dtype
        return head_tensor("ssm", heads, inner, DTYPE_BYTES.get(of, 1), of)


class GatedDeltaNetLayer(_StateLayer, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Linear attention of Qwen3-Next and Qwen3.5."""

    kind: Literal["gdn"]
    key_heads: Count
    value_heads: Count
    key_head_size: Count
    value_head_size: Count

    @property
    def shared(self) -> Shared:
        return (self.key_heads, "key heads"), (self.value_heads, "value heads")

    def tensors(self, layout: ConvLayout | None, dtype: str) -> tuple[StateTensor, ...]:
        """As they lie in a slot; `layout` and `dtype` where the layer names none of its own."""
        parts = qkv_parts(self.key_heads, self.value_heads, self.key_head_size, self.value_head_size)
        inner = (self.value_head_size, self.key_head_size)
        return self.conv(parts, layout, dtype), self.heads_state(self.value_heads, inner, dtype)


class Mamba2Layer(_StateLayer, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """State-space layers of Mamba2, Nemotron-H, Granite 4."""

    kind: Literal["mamba2"]
    heads: Count
    groups: Count
    head_size: Count
    state_size: Count

    @property
    def shared(self) -> Shared:
        return (self.heads, "heads"), (self.groups, "groups")

    def tensors(self, layout: ConvLayout | None, dtype: str) -> tuple[StateTensor, ...]:
        """As they lie in a slot; `layout` and `dtype` where the layer names none of its own."""
        parts = xbc_parts(self.heads, self.groups, self.head_size, self.state_size)
        inner = (self.head_size, self.state_size)
        return self.conv(parts, layout, dtype), self.heads_state(self.heads, inner, dtype)


TokenLayer: TypeAlias = AttentionLayer | WindowLayer | WholeLayer
StateLayer: TypeAlias = GatedDeltaNetLayer | Mamba2Layer
Layer: TypeAlias = TokenLayer | StateLayer

LAYER_KINDS: Mapping[str, type[Layer]] = {
    "attention": AttentionLayer,
    "sliding_window": WindowLayer,
    "mla": WholeLayer,
    "replicated": WholeLayer,
    "gdn": GatedDeltaNetLayer,
    "mamba2": Mamba2Layer,
}
"""Kinds of layers that can be planned, and the record each is read into."""


def is_state(layer: Layer) -> bool:
    """One state a request, no token axis."""
    return isinstance(layer, StateLayer)


def is_dense(layer: Layer) -> bool:
    """Whether copies count from the start of the layer's array; otherwise from the component's place in a block."""
    return layer.kind == "attention"


def state_sizes(layer: StateLayer, dtype: str) -> tuple[int, int]:
    """(values, bytes) of one slot that holds all heads."""
    tensors = layer.tensors(None, dtype)
    values = [sum(part.units * part.channels for part in tensor.parts) * tensor.rows for tensor in tensors]
    sizes = (count * tensor.item_bytes for count, tensor in zip(values, tensors, strict=True))
    return sum(values), sum(sizes)
