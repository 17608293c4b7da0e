"""vLLM's KV tensors, specs and backends -> one RankTable.

The facts come from the views themselves (addresses, strides), from the per-layer spec and from the
backend's name; nothing is taken from the first layer for all (vllm#43765), and head totals come from
the model's configuration, never from local heads times TP (vllm#52516).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mooncake_hetero_tp.core.regions import STATE, Buffer, Group, RankTable, Region, Span, attention_spans, whole_span
from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.vllm_adapter.components import LayerFacts, PageView
from mooncake_hetero_tp.vllm_adapter.drafts import draft_layers, total_kv_heads
from mooncake_hetero_tp.vllm_adapter.encodings import encode
from mooncake_hetero_tp.vllm_adapter.place import Engine, module_of
from mooncake_hetero_tp.vllm_adapter.specs import (
    is_latent,
    is_state,
    is_state_group,
    kind_of,
    layer_specs,
    refuse_unsupported,
)
from mooncake_hetero_tp.vllm_adapter.state_layers import StateLayer, state_regions

logger = logging.getLogger(__name__)

_LONG_NAMES = {"fp8": "fp8_e4m3"}
"""KV cache dtypes that vLLM takes under two names (`kv_cache_dtype_str_to_dtype`)."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One probed layer: its group, how many tokens its kernel pages (or slots) stand for, its regions."""

    name: str
    group: int
    kernel_block_size: int
    regions: tuple[Region, ...]


def build_table(engine: Engine, kv_caches: Mapping[str, torch.Tensor]) -> RankTable:
    """Describe one rank's KV memory.

    Args:
        engine: what is known of this rank.
        kv_caches: what `register_kv_caches` received, layer name -> view `[B * r, H, N, C]`.

    Raises:
        ConfigError: a layer that this connector cannot carry, by name, with the reason and the remedy.
    """
    config = engine.kv_cache_config
    refuse_unsupported(config)
    layers = [
        layer
        for index, group in enumerate(config.transfer_groups)
        for layer in _probe_group(engine, index, group, kv_caches)
    ]
    regions = tuple(region for layer in layers for region in layer.regions)
    if not regions:
        raise ConfigError(
            "no KV cache layer of this model can be transferred: register_kv_caches received "
            f"{sorted(kv_caches) or 'nothing'}, and the transfer groups hold none of it"
        )
    return RankTable(
        tp_size=engine.place.tp_size,
        pp_size=engine.place.pp_size,
        layout=_layout_name(engine),
        model=model_fingerprint(engine.vllm_config),
        groups=tuple(_group(index, group, layers) for index, group in enumerate(config.transfer_groups)),
        regions=regions,
        buffers=tuple(merged_buffers(kv_caches[region.layer] for region in regions)),
        dcp_size=_context_size(engine, "decode_context_parallel_size"),
        pcp_size=_context_size(engine, "prefill_context_parallel_size"),
        draft_layers=draft_layers(engine, dict.fromkeys(region.layer for region in regions)),
        declared_encodings={backend: encoding.value for backend, encoding in engine.backend_encodings.items()},
    )


def _context_size(engine: Engine, name: str) -> int:
    """A context-parallel size of this engine; vLLM releases without the setting have one rank."""
    return int(getattr(engine.vllm_config.parallel_config, name, 1))


def model_fingerprint(vllm_config: Any) -> dict[str, str]:
    """What must agree on both sides whatever their parallel sizes: name -> printable value."""
    model = vllm_config.model_config
    arch = model.model_arch_config
    return {
        "architecture": ", ".join(model.architectures or ()),
        "layers": str(arch.total_num_hidden_layers),
        "kv_heads": str(arch.total_num_kv_heads),
        "head_size": str(arch.head_size),
        "kv_cache_dtype": _cache_dtype_name(vllm_config),
    }


def merged_buffers(views: Iterable[torch.Tensor]) -> list[Buffer]:
    """Each real allocation once, overlapping ones merged, in order of address."""
    spans = sorted({(view.untyped_storage().data_ptr(), view.untyped_storage().nbytes()) for view in views})
    merged: list[Buffer] = []
    for address, length in spans:
        last = merged[-1] if merged else None
        if last is not None and address < last.end:
            merged[-1] = Buffer(last.address, max(last.end, address + length) - last.address)
        else:
            merged.append(Buffer(address, length))
    return merged


def _cache_dtype_name(vllm_config: Any) -> str:
    """`auto` and vLLM's short names resolved, so that an explicit `bfloat16` equals an implied one."""
    name = str(vllm_config.cache_config.cache_dtype)
    return _dtype_name(vllm_config.model_config.dtype) if name == "auto" else _LONG_NAMES.get(name, name)


def _layout_name(engine: Engine) -> str:
    resolved = getattr(engine.kv_cache_config, "kv_cache_layout", None)
    return str(resolved or engine.vllm_config.cache_config.kv_cache_layout)


def _layer_dtype_name(module: Any, spec: Any) -> str:
    """The layer's own cache dtype: vLLM may leave single layers unquantised, and stores most others as bytes."""
    name = str(getattr(module, "kv_cache_dtype", "auto"))
    plain = spec.kv_quant_mode.name == "NONE" or name == "auto"
    return _dtype_name(spec.dtype) if plain else _LONG_NAMES.get(name, name)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _probe_group(engine: Engine, index: int, group: Any, kv_caches: Mapping[str, torch.Tensor]) -> Iterator[_Layer]:
    """Every layer of a group that lives on this rank, aliases of shared KV left out."""
    seen: dict[int, str] = {}
    for name, spec in layer_specs(group):
        view = kv_caches.get(name)
        if view is None:
            continue  # another pipeline rank's layer
        if (address := view.data_ptr()) in seen:
            logger.debug("%s shares the KV cache of %s", name, seen[address])
            continue
        seen[address] = name
        yield _probe_layer(engine, index, spec, name, view)


def _probe_layer(engine: Engine, index: int, spec: Any, name: str, view: torch.Tensor) -> _Layer:
    if is_state(spec):
        state = StateLayer(
            name=name,
            module=module_of(engine, name),
            spec=spec,
            tp_size=engine.place.tp_size,
            tp_rank=engine.place.tp_rank,
        )
        return _Layer(name, index, int(spec.block_size), state_regions(state, index, view))
    tokens = _kernel_tokens(engine, name, spec, view)
    facts = _layer_facts(engine, name, spec, view)
    encoding, components = encode(facts, _page_view(name, view), engine.backend_encodings)
    spans = _spans(engine, facts, spec)
    regions = tuple(
        Region(
            layer=name,
            component=part.name,
            group=index,
            base=view.data_ptr() + part.offset,
            block_stride=view.stride(0) * view.element_size(),
            num_blocks=int(view.shape[0]),
            spans=spans,
            unit=part.unit,
            token=part.token,
            channel=part.channel,
            item_bytes=part.item_bytes,
            dtype=part.dtype or facts.dtype,
            encoding=encoding,
        )
        for part in components
    )
    return _Layer(name, index, tokens, regions)


def _kernel_tokens(engine: Engine, name: str, spec: Any, view: torch.Tensor) -> int:
    """Tokens of one kernel page, from the view; a logical block is a whole number of them (vllm#54272)."""
    num_blocks = engine.kv_cache_config.num_blocks
    pages, tokens = (view.shape[0], view.shape[2]) if view.ndim == 4 else (0, 0)
    if pages < 1 or pages % num_blocks or tokens * (pages // num_blocks) != spec.block_size:
        raise ConfigError(
            f"{name}: expected a view [blocks * r, heads, tokens, content] of {num_blocks} logical blocks of "
            f"{spec.block_size} tokens, got shape {tuple(view.shape)}; this vLLM lays the layer out in a way "
            "this connector does not know"
        )
    return int(tokens)


def _page_view(name: str, view: torch.Tensor) -> PageView:
    if view.shape[3] > 1 and view.stride(3) != 1:
        raise ConfigError(
            f"{name}: the content dim is not contiguous (strides {view.stride()}); "
            "choose a KV cache layout whose C is innermost"
        )
    item = view.element_size()
    return PageView(
        heads=int(view.shape[1]),
        tokens=int(view.shape[2]),
        content_bytes=int(view.shape[3]) * item,
        head_stride=view.stride(1) * item,
        token_stride=view.stride(2) * item,
    )


def _layer_facts(engine: Engine, name: str, spec: Any, view: torch.Tensor) -> LayerFacts:
    module = module_of(engine, name)
    return LayerFacts(
        layer=name,
        backend=str(module.get_attn_backend().get_name()),
        isa=getattr(module, "isa", None),
        latent=is_latent(spec),
        kv_heads=int(spec.num_kv_heads),
        head_size=int(spec.head_size),
        head_size_v=int(spec.head_size_v),
        item_bytes=view.element_size(),
        dtype=_layer_dtype_name(module, spec),
        own_slots=spec.num_head_slots is not None,
        own_content=spec.state_content_bytes is not None,
        quantisation=spec.kv_quant_mode.name,
    )


def _spans(engine: Engine, facts: LayerFacts, spec: Any) -> tuple[Span, ...]:
    """Which global units the rank holds; refused where vLLM allocated another number."""
    if facts.latent:
        return whole_span(1)
    place = engine.place
    spans = attention_spans(total_kv_heads(engine, facts.layer, spec), place.tp_size, place.tp_rank)
    held = sum(span.count for span in spans)
    if held != facts.kv_heads:
        raise ConfigError(
            f"{facts.layer}: by the model's configuration TP rank {place.tp_rank} of {place.tp_size} holds {held} "
            f"KV heads, but vLLM allocated {facts.kv_heads}; this model cuts its heads in a way this connector "
            "does not know"
        )
    return spans


def _group(index: int, group: Any, layers: Sequence[_Layer]) -> Group:
    kernel = {layer.kernel_block_size: layer.name for layer in layers if layer.group == index}
    if len(kernel) > 1:
        raise ConfigError(
            f"KV cache group {index} mixes kernel block sizes "
            f"({', '.join(f'{name}: {size}' for size, name in kernel.items())}); set --block-size to the smallest"
        )
    block_size = int(group.kv_cache_spec.block_size)
    return Group(
        index=index,
        kind=STATE if is_state_group(group) else kind_of(group),
        block_size=block_size,
        kernel_block_size=next(iter(kernel), block_size),
    )
