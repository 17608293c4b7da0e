"""How each attention backend lays a page's content out.

vLLM hands over every layer as a view `[B, H, N, C]` (kernel page, head slot, token, content). The
view's strides are true for the *page*, not for its content: what lies inside C, and whether token n of
a page really starts at `n * stride(N)`, is the backend's business. The table below names that, keyed by
the backend's own name, and is tested against the backends themselves (tests/integration/test_encoding_*).

    name                    backends                            content of one head's page
    packed                  the stride readers of `PACKED`      [N][K of D | V of D_v]
    halves.transposed_k     CPU_ATTN, isa vec and vec16         [D][N] K half, then [N][D] V half
    latent                  the row writers of `LATENT`         [N][latent row], the same on every TP rank
    opaque:<backend>        everything else                     unknown: whole kernel pages only

An encoding that is not in the table is opaque, never guessed: CPU_ATTN with isa amx (VNNI tiles), B12X and
ROCM_ATTN (two slots, heads inside C), scales inline or apart (Triton's per-token ones, NVFP4), TurboQuant.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_hetero_tp.core.regions import Axis
from mooncake_hetero_tp.errors import ConfigError

PACKED = frozenset(
    {
        "FLASH_ATTN",
        "FLASH_ATTN_DIFFKV",
        "FLASHINFER",
        "FLEX_ATTENTION",
        "ROCM_AITER_UNIFIED_ATTN",
        "TRITON_ATTN",
        "TRITON_ATTN_DIFFKV",
        "TRITON_FLASH_ATTN",
        "TRITON_FLASHINFER",
    }
)
"""Backends that take K and V out of C with `kv_cache.transpose(1, 2).split(head_size, dim=-1)`."""
LATENT = frozenset({"CPU_MLA", "CUTLASS_MLA", "FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA"})
"""MLA backends that write one latent row a token (`concat_and_cache_mla`)."""
_CPU_ROW_ISAS = frozenset({"vec", "vec16"})
_OPAQUE = "opaque"


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
    own_slots: bool
    """The backend published its own H (`AttentionSpec.num_head_slots`): a slot is no KV head."""
    own_content: bool
    """The backend published its own C (`AttentionSpec.state_content_bytes`): more than K and V lie in it."""
    plain_values: bool
    """Unquantised, or FP8 with one scale a layer: one item is one value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One component of a page: offset from the page's start and three strided axes, in bytes."""

    name: str
    offset: int
    unit: Axis
    token: Axis
    channel: Axis
    item_bytes: int


def encode(facts: LayerFacts, view: PageView) -> tuple[str, tuple[Component, ...]]:
    """Name the encoding of a layer and the components that one page holds.

    Raises:
        ConfigError: the page cannot be described even as a whole; names the layer and the backend.
    """
    if not _plain(facts, view):
        return _opaque_name(facts), _opaque(facts, view)
    if facts.latent and facts.backend in LATENT:
        return "latent", (_latent(facts, view),)
    if not facts.latent and facts.backend in PACKED:
        return "packed", _packed(facts, view)
    if not facts.latent and _is_halved(facts, view):
        return "halves.transposed_k", _halves(facts, view)
    return _opaque_name(facts), _opaque(facts, view)


def _plain(facts: LayerFacts, view: PageView) -> bool:
    """One slot per KV head, holding K and V of full width and nothing else."""
    content = (facts.head_size + facts.head_size_v) * facts.item_bytes
    return (
        facts.plain_values
        and not facts.own_slots
        and not facts.own_content
        and view.heads == facts.kv_heads
        and view.content_bytes == content
    )


def _packed(facts: LayerFacts, view: PageView) -> tuple[Component, ...]:
    item = facts.item_bytes
    unit, token = Axis(view.heads, view.head_stride), Axis(view.tokens, view.token_stride)
    return (
        Component(name="k", offset=0, unit=unit, token=token, channel=Axis(facts.head_size, item), item_bytes=item),
        Component(
            name="v",
            offset=facts.head_size * item,
            unit=unit,
            token=token,
            channel=Axis(facts.head_size_v, item),
            item_bytes=item,
        ),
    )


def _is_halved(facts: LayerFacts, view: PageView) -> bool:
    """CPU_ATTN views a head's page as `[2 * N, D]` and chunks it; that needs D == D_v and dense rows."""
    dense = view.token_stride == view.content_bytes
    equal = facts.head_size == facts.head_size_v
    return facts.backend == "CPU_ATTN" and facts.isa in _CPU_ROW_ISAS and equal and dense


def _halves(facts: LayerFacts, view: PageView) -> tuple[Component, ...]:
    item, tokens, width = facts.item_bytes, view.tokens, facts.head_size
    unit = Axis(view.heads, view.head_stride)
    return (
        Component(
            name="k",
            offset=0,
            unit=unit,
            token=Axis(tokens, item),
            channel=Axis(width, tokens * item),
            item_bytes=item,
        ),
        Component(
            name="v",
            offset=tokens * width * item,
            unit=unit,
            token=Axis(tokens, width * item),
            channel=Axis(width, item),
            item_bytes=item,
        ),
    )


def _latent(facts: LayerFacts, view: PageView) -> Component:
    item = facts.item_bytes
    return Component(
        name="latent",
        offset=0,
        unit=Axis(1, view.head_stride),
        token=Axis(view.tokens, view.token_stride),
        channel=Axis(view.content_bytes // item, item),
        item_bytes=item,
    )


def _opaque_name(facts: LayerFacts) -> str:
    backend = facts.backend if facts.isa is None else f"{facts.backend}.{facts.isa}"
    return f"{_OPAQUE}:{backend}"


def _opaque(facts: LayerFacts, view: PageView) -> tuple[Component, ...]:
    """Components that tile the page; they say where its bytes are, not what they mean.

    With one slot per unit the unit axis is that of the view. Otherwise heads lie inside the slots, so
    the unit axis goes inside the token axis, where the planner refuses to cut it.
    """
    units = facts.kv_heads
    if not facts.own_slots and view.heads == units:
        channel = _channel(view.content_bytes, facts.item_bytes)
        unit, token = Axis(units, view.head_stride), Axis(view.tokens, view.token_stride)
        return (Component(name="kv", offset=0, unit=unit, token=token, channel=channel, item_bytes=channel.stride),)
    return tuple(_slot(facts, view, slot, units) for slot in range(view.heads))


def _slot(facts: LayerFacts, view: PageView, slot: int, units: int) -> Component:
    if view.content_bytes % units:
        raise ConfigError(
            f"{facts.layer}: backend {facts.backend} keeps {view.heads} slots of {view.content_bytes} bytes a "
            f"token for {units} KV heads, which this connector cannot describe; use another attention backend "
            "or another KV cache dtype"
        )
    channel = _channel(view.content_bytes // units, facts.item_bytes)
    return Component(
        name=f"slot{slot}",
        offset=slot * view.head_stride,
        unit=Axis(units, view.content_bytes // units),
        token=Axis(view.tokens, view.token_stride),
        channel=channel,
        item_bytes=channel.stride,
    )


def _channel(length_bytes: int, item_bytes: int) -> Axis:
    """The channel axis of `length_bytes` contiguous bytes, in items where they divide, else in bytes."""
    step = item_bytes if length_bytes % item_bytes == 0 else 1
    return Axis(length_bytes // step, step)
