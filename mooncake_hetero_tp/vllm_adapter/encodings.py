"""How each attention backend lays a page's content out.

vLLM hands over every layer as a view `[B, H, N, C]` (kernel page, head slot, token, content). The
view's strides are true for the *page*, not for its content: what lies inside C, and whether token n of
a page really starts at `n * stride(N)`, is the backend's business. The table below names that, keyed by
the backend's own name, and is tested against the backends themselves (tests/integration/test_encoding_*).

    name                    backends                            content of one head's page
    packed                  the stride readers of `PACKED`      [N][K of D | V of D_v]
    halves.transposed_k     CPU_ATTN, isa vec and vec16         [D][N] K half, then [N][D] V half
    packed.scales           TRITON_ATTN, a scale a token+head   [N][K | its scale | V | its scale] (`scales.py`)
    slots                   B12X                                slot 0 [N][heads of K], slot 1 [N][heads of V]
    latent                  the row writers of `LATENT`         [N][latent row], the same on every TP rank
    opaque:FLASHINFER.nvfp4 FLASHINFER with NVFP4               data and scales apart (`scales.py`): whole pages of heads
    opaque:<backend>        everything else                     unknown: whole kernel pages only

A backend that is not in the table may be declared by the operator (setting `backend_encodings`). Anything else is
opaque, never guessed: CPU_ATTN with isa amx (VNNI tiles), ROCM_ATTN and
ROCM_AITER_FA with shuffled pages (two slots whose K is packed 16 bytes deep), TurboQuant and its like, indexers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mooncake_hetero_tp.core.regions import Axis
from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.types import Encoding
from mooncake_hetero_tp.vllm_adapter.components import Component, LayerFacts, PageView
from mooncake_hetero_tp.vllm_adapter.scales import NVFP4, has_inline_scales, has_side_scales, inline_scales, side_scales

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
PLANES = frozenset({"B12X"})
"""Backends that take K and V from two slots with `kv_cache.unbind(1)` and find heads in C (`unflatten`)."""
SLOTS = "slots"
CPU_ATTN = "CPU_ATTN"
_CPU_ROW_ISAS = frozenset({"vec", "vec16"})
_OPAQUE = "opaque"
_NOTHING_DECLARED: Mapping[str, Encoding] = MappingProxyType({})


def encode(
    facts: LayerFacts, view: PageView, declared: Mapping[str, Encoding] = _NOTHING_DECLARED
) -> tuple[str, tuple[Component, ...]]:
    """Name the encoding of a layer and the components that one page holds.

    Args:
        facts: what vLLM says of the layer.
        view: where its pages' heads and tokens are.
        declared: encodings of backends that are not in the table, as the operator declared them.

    Raises:
        ConfigError: the page cannot be described even as a whole, or is not what its backend is declared to write;
            names the layer and the backend.
    """
    encoding = declared.get(facts.backend)
    if encoding is None:
        return _by_table(facts, view)
    if reason := _why_not(encoding, facts, view):
        raise ConfigError(
            f"{facts.layer}: backend_encodings declares {facts.backend} as {encoding.value!r}, but {reason}; "
            f"remove {facts.backend} from backend_encodings on both engines"
        )
    return encoding.value, _components(encoding, facts, view)


def _by_table(facts: LayerFacts, view: PageView) -> tuple[str, tuple[Component, ...]]:
    if has_inline_scales(facts, view):
        return "packed.scales", inline_scales(facts, view)
    if has_side_scales(facts, view):
        return f"{_opaque_name(facts)}.{NVFP4}", side_scales(facts, view)
    if _has_planes(facts, view):
        return SLOTS, _planes(facts, view)
    encoding = _known(facts, view)
    if encoding is None:
        return _opaque_name(facts), _opaque(facts, view)
    return encoding.value, _components(encoding, facts, view)


def _known(facts: LayerFacts, view: PageView) -> Encoding | None:
    """The encoding of one slot per KV head by the table; None: it is not in there, or the page holds something else."""
    if not _plain(facts, view):
        return None
    if facts.latent:
        return Encoding.LATENT if facts.backend in LATENT else None
    if facts.backend in PACKED:
        return Encoding.PACKED
    halved = facts.backend == CPU_ATTN and facts.isa in _CPU_ROW_ISAS and _can_be_halved(facts, view)
    return Encoding.HALVES if halved else None


def _components(encoding: Encoding, facts: LayerFacts, view: PageView) -> tuple[Component, ...]:
    if encoding is Encoding.LATENT:
        return (_latent(facts, view),)
    return _packed(facts, view) if encoding is Encoding.PACKED else _halves(facts, view)


def _why_not(encoding: Encoding, facts: LayerFacts, view: PageView) -> str | None:
    """Why a page of this layer cannot be in a declared encoding; None: it can."""
    if facts.backend in PACKED | LATENT | PLANES | {CPU_ATTN}:
        name, _ = _by_table(facts, view)
        return None if name == encoding.value else f"this package knows its pages as {name!r}"
    if facts.latent != (encoding is Encoding.LATENT):
        return f"the layer's cache holds {'one latent row a token (MLA)' if facts.latent else 'K and V of each head'}"
    if not _plain(facts, view):
        wanted = (facts.head_size + facts.head_size_v) * facts.item_bytes
        return (
            f"expected {facts.kv_heads} heads of {wanted} unscaled bytes a token, got {view.heads} slots of "
            f"{view.content_bytes} bytes"
        )
    if encoding is Encoding.HALVES and not _can_be_halved(facts, view):
        return f"halves need K and V of equal width and a head's tokens together, got {view}"
    return None


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


def _has_planes(facts: LayerFacts, view: PageView) -> bool:
    """Slot 0 holds K and slot 1 holds V, each `[N][heads of D]`, which the backend reads and writes by stride."""
    row = facts.kv_heads * facts.head_size * facts.item_bytes
    equal = facts.head_size == facts.head_size_v
    return (
        facts.backend in PLANES
        and facts.plain_values
        and facts.own_slots
        and equal
        and (view.heads, view.content_bytes) == (2, row)
    )


def _planes(facts: LayerFacts, view: PageView) -> tuple[Component, ...]:
    item, width = facts.item_bytes, facts.head_size
    return tuple(
        Component(
            name=name,
            offset=slot * view.head_stride,
            unit=Axis(facts.kv_heads, width * item),
            token=Axis(view.tokens, view.token_stride),
            channel=Axis(width, item),
            item_bytes=item,
        )
        for slot, name in enumerate("kv")
    )


def _can_be_halved(facts: LayerFacts, view: PageView) -> bool:
    """CPU_ATTN views a head's page as `[2 * N, D]` and chunks it; that needs D == D_v and dense rows."""
    return facts.head_size == facts.head_size_v and view.token_stride == view.content_bytes


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
