"""Pages that hold quantised values and their scales side by side.

    packed.scales       a head's token is `[K | K scale | V | V scale]`, scales of 4 bytes in the last bytes of each
                        half (`TritonAttentionImpl._ensure_scale_caches`): known, cut and converted like `packed`
    opaque:...nvfp4     a page is `[K data | K scales | V data | V scales]`, heads outermost in each of the four where
                        the layout is head-major (`_nvfp4_kv_views` of vLLM's FlashInfer backend). The kernels may order a
                        head's scales as they like, so a head's four pieces move whole, between equal kernel pages.

A view's strides say neither: with NVFP4 head slot i does not hold head i (vllm#52516).
"""

from __future__ import annotations

from itertools import product

from mooncake_hetero_tp.core.regions import Axis
from mooncake_hetero_tp.vllm_adapter.components import Component, LayerFacts, PageView

NVFP4 = "nvfp4"
_INLINE = {"INT8_PER_TOKEN_HEAD": 1, "FP8_PER_TOKEN_HEAD": 1, "INT4_PER_TOKEN_HEAD": 2}
"""`KVQuantMode` -> values in one item."""
_SCALE_BYTES = 4
_SCALE_DTYPE = "float32"
_DATA_SHARE, _WHOLE = 8, 9
"""NVFP4: of 9 bytes, 8 hold 16 values of 4 bits and one their scale (`nvfp4_split_data_scale`)."""


def has_inline_scales(facts: LayerFacts, view: PageView) -> bool:
    """Triton's per-token-head modes; its kernels halve the content, so K and V are of equal width."""
    if facts.backend != "TRITON_ATTN" or facts.latent or facts.own_slots or facts.quantisation not in _INLINE:
        return False
    content = 2 * (_data_bytes(facts) + _SCALE_BYTES)
    aligned = all(stride % _SCALE_BYTES == 0 for stride in (view.head_stride, view.token_stride, content // 2))
    equal = facts.head_size == facts.head_size_v
    return equal and aligned and (view.heads, view.content_bytes) == (facts.kv_heads, content)


def inline_scales(facts: LayerFacts, view: PageView) -> tuple[Component, ...]:
    """`k`, `k.scale`, `v`, `v.scale` of one page."""
    data, item = _data_bytes(facts), facts.item_bytes
    unit, token = Axis(view.heads, view.head_stride), Axis(view.tokens, view.token_stride)
    values, scale = Axis(data // item, item), Axis(1, _SCALE_BYTES)
    made = []
    for name, start in (("k", 0), ("v", data + _SCALE_BYTES)):
        made += [
            Component(name=name, offset=start, unit=unit, token=token, channel=values, item_bytes=item),
            Component(
                name=f"{name}.scale",
                offset=start + data,
                unit=unit,
                token=token,
                channel=scale,
                item_bytes=_SCALE_BYTES,
                dtype=_SCALE_DTYPE,
            ),
        ]
    return tuple(made)


def has_side_scales(facts: LayerFacts, view: PageView) -> bool:
    """FlashInfer's NVFP4 pages, which it refuses itself unless they are dense."""
    if facts.backend != "FLASHINFER" or facts.quantisation != "NVFP4" or not facts.own_slots or facts.latent:
        return False
    whole = view.heads == 2 * facts.kv_heads and view.content_bytes % _WHOLE == 0
    return whole and (_is_head_major(view) or _is_token_major(view))


def side_scales(facts: LayerFacts, view: PageView) -> tuple[Component, ...]:
    """`k.data`, `k.scale`, `v.data`, `v.scale` of one page; heads inside tokens where the layout is token-major."""
    heads, tokens = facts.kv_heads, view.tokens
    data = view.content_bytes * _DATA_SHARE // _WHOLE
    rows = {"data": data, "scale": view.content_bytes - data}
    made, offset = [], 0
    for side, part in product("kv", rows):
        row = rows[part]
        unit, token = (tokens * row, row) if _is_head_major(view) else (row, heads * row)
        made.append(
            Component(
                name=f"{side}.{part}",
                offset=offset,
                unit=Axis(heads, unit),
                token=Axis(tokens, token),
                channel=Axis(row, 1),
                item_bytes=1,
            )
        )
        offset += heads * tokens * row
    return tuple(made)


def _data_bytes(facts: LayerFacts) -> int:
    """Of the values of one head and token, of K or of V."""
    return facts.head_size * facts.item_bytes // _INLINE[facts.quantisation]


def _is_head_major(view: PageView) -> bool:
    return (view.head_stride, view.token_stride) == (view.tokens * view.content_bytes, view.content_bytes)


def _is_token_major(view: PageView) -> bool:
    return (view.head_stride, view.token_stride) == (view.content_bytes, view.heads * view.content_bytes)
