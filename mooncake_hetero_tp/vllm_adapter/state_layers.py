"""vLLM's state-space, linear-attention and short-convolution layers -> Regions.

vLLM hands a layer's cache over as `[blocks, 1, 1, bytes]`: one slot a block, the tensors of `MambaSpec.shapes` back to
back, then padding. What the tensors are made of, and which part TP cuts where, only the layer's module knows; what it
says is checked against the shapes that vLLM allocated, and a layer of which one is not as expected is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from mooncake_hetero_tp.core.regions import Region
from mooncake_hetero_tp.core.state_tensors import (
    ConvLayout,
    Slots,
    StatePart,
    StateTensor,
    conv_tensor,
    head_tensor,
    local_shape,
    place,
    qkv_parts,
    xbc_parts,
)
from mooncake_hetero_tp.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLayer:
    """One layer's state on one rank: vLLM's module and spec, and how many ranks share the state."""

    name: str
    module: Any
    spec: Any
    tp_size: int
    tp_rank: int

    @property
    def shards(self) -> tuple[int, int]:
        """(ranks that share the state, this one's number); one where each holds all of it."""
        return (1, 0) if self.spec.tp_replicated else (self.tp_size, self.tp_rank)

    def total(self, *names: str) -> int:
        """A number of the whole model, by the first of these attributes that the module has.

        Raises:
            ConfigError: it has none of them.
        """
        for name in names:
            value = getattr(self.module, name, None)
            if isinstance(value, int):
                return value
        raise self.refused(f"its module {type(self.module).__name__} does not say its {' or '.join(names)}")

    def conv(self, parts: tuple[StatePart, ...]) -> StateTensor:
        """The first tensor, as the state of a convolution over `parts`.

        Raises:
            ConfigError: vLLM allocated no tensor of two axes there.
        """
        layout = ConvLayout.DS if is_conv_state_dim_first() else ConvLayout.SD
        shape = self.spec.shapes[0]
        if len(shape) != 2:
            raise self.refused(f"its convolution's state has the shape {tuple(shape)}, expected two axes")
        rows = int(shape[1] if layout is ConvLayout.DS else shape[0])
        return conv_tensor(parts, rows, layout, *self._items(0))

    def heads(self, component: str, number: int, heads: int) -> StateTensor:
        """The tensor at place `number`, cut by its first axis; `heads` are those of the whole model."""
        return head_tensor(component, heads, self.spec.shapes[number][1:], *self._items(number))

    def _items(self, number: int) -> tuple[int, str]:
        dtype: torch.dtype = self.spec.dtypes[number]
        return dtype.itemsize, str(dtype).removeprefix("torch.")

    def refused(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{self.name}: the state of this layer cannot be transferred: {reason}. Serve this model without KV "
            "transfer, or at the same vLLM release with a layer this connector knows"
        )


def state_regions(layer: StateLayer, group: int, view: torch.Tensor) -> tuple[Region, ...]:
    """One Region for each component of a layer's state; padding is in none of them.

    Args:
        layer: what vLLM says of it.
        group: index of its KV cache group.
        view: its cache, int8 `[blocks, 1, 1, bytes]`.

    Raises:
        ConfigError: a layer of an unknown kind, or one whose shapes are not what its module says; names it.
    """
    _check_view(layer, view)
    tensors = _describe(layer)
    _check_shapes(layer, tensors)
    slots = Slots(
        layer=layer.name,
        group=group,
        base=view.data_ptr(),
        block_stride=view.stride(0) * view.element_size(),
        num_blocks=int(view.shape[0]),
    )
    return tuple(slots.region(part) for part in place(tensors, *layer.shards))


# --- what each kind is made of ---------------------------------------------------------------------------------------


def _describe(layer: StateLayer) -> tuple[StateTensor, ...]:
    kind = str(layer.spec.mamba_type.name)
    describe = _KINDS.get(kind)
    if describe is None:
        raise layer.refused(f"its kind {kind} is not one of {', '.join(sorted(_KINDS))}")
    return describe(layer)


def _delta_net(layer: StateLayer) -> tuple[StateTensor, ...]:
    """Gated delta net (Qwen3-Next, Qwen3.5, OLMo) or, where keys and values share heads, Kimi's delta attention."""
    if not hasattr(layer.module, "num_v_heads"):
        return _kimi(layer)
    keys, values = layer.total("num_k_heads"), layer.total("num_v_heads")
    parts = qkv_parts(keys, values, layer.total("head_k_dim"), layer.total("head_v_dim"))
    return layer.conv(parts), layer.heads("ssm", 1, values)


def _kimi(layer: StateLayer) -> tuple[StateTensor, ...]:
    """With drafts, two records of what they changed follow the state (`append_kda_recoverssm_record`)."""
    heads, width = layer.total("num_heads"), layer.total("head_dim")
    records = (layer.heads(f"record{number - 1}", number, heads) for number in range(2, len(layer.spec.shapes)))
    return layer.conv(qkv_parts(heads, heads, width, width)), layer.heads("ssm", 1, heads), *records


def _mamba1(layer: StateLayer) -> tuple[StateTensor, ...]:
    channels = layer.total("intermediate_size")
    return layer.conv((StatePart("conv", channels, 1),)), layer.heads("ssm", 1, channels)


def _mamba2(layer: StateLayer) -> tuple[StateTensor, ...]:
    if len(layer.spec.shapes) > 2:
        raise layer.refused("how much of its ring of recent inputs counts is kept elsewhere (--use-replayssm)")
    heads, width = layer.total("num_heads"), layer.total("head_dim")
    parts = xbc_parts(heads, _mamba2_groups(layer), width, layer.total("ssm_state_size"))
    return layer.conv(parts), layer.heads("ssm", 1, heads)


def _mamba2_groups(layer: StateLayer) -> int:
    """The model's own number: the module's is extended to TP where TP does not divide it, its norm's is not."""
    groups = getattr(getattr(layer.module, "norm", None), "n_groups", None)
    if isinstance(groups, int):
        return groups
    if layer.shards[0] == 1:
        return layer.total("n_groups")
    raise layer.refused(f"its module {type(layer.module).__name__} does not say how many groups share B and C")


def _short_conv(layer: StateLayer) -> tuple[StateTensor, ...]:
    """LFM2, and the per-layer embeddings of which each rank holds all."""
    return (layer.conv((StatePart("conv", layer.total("conv_dim", "hc_hidden_size"), 1),)),)


def _linear(layer: StateLayer) -> tuple[StateTensor, ...]:
    return (layer.heads("state", 0, layer.total("num_heads")),)


_KINDS: Mapping[str, Callable[[StateLayer], tuple[StateTensor, ...]]] = {
    "GDN_ATTN": _delta_net,
    "LINEAR": _linear,
    "MAMBA1": _mamba1,
    "MAMBA2": _mamba2,
    "SHORT_CONV": _short_conv,
}
"""By the names of vLLM's MambaAttentionBackendEnum."""


# --- is it what vLLM allocated? --------------------------------------------------------------------------------------


def _check_view(layer: StateLayer, view: torch.Tensor) -> None:
    live = layer.spec.state_content_size_bytes
    seen = (*view.shape[1:3], view.shape[3] * view.element_size()) if view.ndim == 4 else tuple(view.shape)
    if seen != (1, 1, live) or view.stride(3) != 1:
        raise layer.refused(f"expected a view [blocks, 1, 1, {live} bytes], got shape {tuple(view.shape)}")


def _check_shapes(layer: StateLayer, tensors: tuple[StateTensor, ...]) -> None:
    allocated = [tuple(shape) for shape in layer.spec.shapes]
    expected = [_cut_shape(tensor, layer) for tensor in tensors]
    seen = [shape[: len(axes)] for shape, axes in zip(allocated, expected, strict=False)]
    if len(allocated) != len(expected) or seen != expected:
        raise layer.refused(
            f"by its module TP rank {layer.tp_rank} of {layer.tp_size} holds {len(expected)} tensors whose first axes "
            f"are {expected}, but vLLM allocated the shapes {allocated}"
        )


def _cut_shape(tensor: StateTensor, layer: StateLayer) -> tuple[int, ...]:
    """The axes that TP cuts, and those beside them: both of a convolution's, the heads alone."""
    width, rows, _ = local_shape(tensor, *layer.shards)
    heads = width // tensor.parts[0].channels
    return {"UCR": (width, rows), "RUC": (rows, width), "URC": (heads,)}[tensor.order]
