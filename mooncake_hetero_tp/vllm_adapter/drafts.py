"""Which layers are a draft model's, and how many KV heads a layer has over all TP ranks.

A draft model has a configuration of its own, so its layers' head totals come from there: with the target's, or
with a count guessed from "one layer more", the draft's pages are cut in the wrong places (vllm-ascend#8540).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.vllm_adapter.place import Engine
from mooncake_hetero_tp.vllm_adapter.specs import layer_specs

_DRAFT_PREFIX = "draft_model."
"""Of the layers of a whole model that drafts (`vllm/v1/spec_decode/draft_model.py`), which count from 0 again."""


def draft_layers(engine: Engine, names: Iterable[str]) -> tuple[str, ...]:
    """Those of the named layers that belong to a draft model."""
    specs = {name: spec for group in engine.kv_cache_config.transfer_groups for name, spec in layer_specs(group)}
    return tuple(name for name in names if is_draft(engine, name, specs[name]))


def is_draft(engine: Engine, name: str, spec: Any) -> bool:
    """By vLLM's own mark (0.33: the spec's; a module's where the V2 model runner loaded it), or by its name.

    Older runners mark nothing: there the layers of EAGLE and MTP drafts are numbered on from the model's.
    """
    module = engine.vllm_config.compilation_config.static_forward_context.get(name)
    marked = getattr(spec, "is_draft", False) or getattr(module, "is_draft_layer", False)
    return bool(marked) or name.startswith(_DRAFT_PREFIX) or _is_past_the_model(engine, name)


def total_kv_heads(engine: Engine, name: str, spec: Any) -> int:
    """KV heads of this layer over all TP ranks, from the model's (or the draft model's) configuration.

    At TP 1 the rank holds them all, so its own count is the total whatever the configuration says.

    Raises:
        ConfigError: a draft layer, and no draft model is configured.
    """
    if engine.place.tp_size == 1:
        return int(spec.num_kv_heads)
    arch = engine.vllm_config.model_config.model_arch_config
    if is_draft(engine, name, spec):
        return int(_draft_arch(engine, name).total_num_kv_heads)
    index = _layer_index(name)
    return int((arch if index is None else arch[index]).total_num_kv_heads)


def _is_past_the_model(engine: Engine, name: str) -> bool:
    index = _layer_index(name)
    layers = engine.vllm_config.model_config.model_arch_config.total_num_hidden_layers
    return index is not None and index >= layers


def _layer_index(name: str) -> int | None:
    """The first number of a dotted layer name: `model.layers.7.self_attn.attn` -> 7."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def _draft_arch(engine: Engine, name: str) -> Any:
    draft = getattr(engine.vllm_config.speculative_config, "draft_model_config", None)
    if draft is None:
        raise ConfigError(
            f"{name}: the layer is not one of the model's and no draft model is configured, so the number of "
            "its KV heads over all TP ranks is unknown; set --speculative-config, or serve at TP 1"
        )
    return draft.model_arch_config
