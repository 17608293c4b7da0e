"""A model's `config.json`, as Hugging Face writes it -> the layers that vLLM keeps a KV cache for.

Only JSON is read. A family is one rule; what no rule covers is refused by name, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from mooncake_hetero_tp.cli.layers import AttentionLayer, GatedDeltaNetLayer, Layer, WholeLayer, WindowLayer
from mooncake_hetero_tp.cli.limits import DTYPE_BYTES
from mooncake_hetero_tp.errors import ConfigError

INDEXER_BLOCK: Final = 128
"""Channels of an indexer key that share one 4-byte scale (vLLM: `Indexer.quant_block_size`)."""
_TEXT: Final = ("text_config", "llm_config", "language_config")
"""Where models that also see or hear keep what concerns us."""
MAX_LAYERS: Final = 4096


class ModelConfig(msgspec.Struct, frozen=True):
    """One model's config, to be asked for its fields."""

    family: str
    fields: dict[str, Any]

    def count(self, *names: str) -> int:
        """A positive number, by the first of these names that has one.

        Raises:
            ConfigError: none has.
        """
        for name in names:
            value = self.fields.get(name)
            if value is not None:
                if type(value) is not int or not 1 <= value <= 1 << 32:
                    raise ConfigError(f"config.json: {name} is {value!r}; expected a positive number")
                return value
        raise ConfigError(
            f"config.json of the {self.family} model does not say its {' or '.join(names)}; add it, for what is left "
            "out is a default of transformers that is not read here"
        )

    @property
    def layers(self) -> range:
        found = self.count("num_hidden_layers")
        if found > MAX_LAYERS:
            raise ConfigError(f"config.json: num_hidden_layers is {found}; expected at most {MAX_LAYERS}")
        return range(found)

    @property
    def heads(self) -> int:
        return self.count("num_key_value_heads", "num_attention_heads")

    @property
    def head_size(self) -> int:
        if self.fields.get("head_dim") is not None:
            return self.count("head_dim")
        return self.count("hidden_size") // self.count("num_attention_heads")

    @property
    def dtype(self) -> str:
        """Of the weights; vLLM takes bfloat16 for float32 and for what is not said."""
        named = str(self.fields.get("dtype") or self.fields.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if named not in DTYPE_BYTES:
            raise ConfigError(f"config.json: dtype {named!r} is unknown; known: {', '.join(DTYPE_BYTES)}")
        return "bfloat16" if named in {"float32", "float", "float64"} else named

    def kinds(self, default: Callable[[int], str]) -> list[str]:
        """Of each layer: `layer_types`, or what the family does by itself."""
        listed = self.fields.get("layer_types")
        if listed is None:
            return [default(number) for number in self.layers]
        if not isinstance(listed, list) or len(listed) != len(self.layers):
            raise ConfigError(f"config.json: layer_types does not name each of the {len(self.layers)} layers")
        return [str(kind) for kind in listed]


def read_model(directory: Path) -> ModelConfig:
    """The text model of a directory with a `config.json`.

    Raises:
        ConfigError: no such file, no JSON, or a family without a rule; names it and those that have one.
    """
    path = directory / "config.json"
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} holds {type(fields).__name__}, expected an object")
    inner: dict[str, Any] = next((fields[name] for name in _TEXT if isinstance(fields.get(name), dict)), {})
    family = str(inner.get("model_type") or fields.get("model_type") or "")
    if family not in FAMILIES:
        named = ", ".join(map(str, fields.get("architectures") or ())) or "none named"
        raise ConfigError(
            f"{path}: model_type {family!r} (architectures: {named}) is not one whose KV cache is known here; "
            f"known: {', '.join(sorted(FAMILIES))}. Describe its layers in a case file instead"
        )
    return ModelConfig(family, {**fields, **inner})


def model_layers(model: ModelConfig, cache_dtype: str) -> list[Layer]:
    """All layers with a cache, in the model's order, all of group 0.

    Raises:
        ConfigError: a field is missing, or says something that the rule does not cover.
    """
    return list(FAMILIES[model.family](model, cache_dtype))


# --- families --------------------------------------------------------------------------------------------------------

Rule = Callable[[ModelConfig, str], Iterator[Layer]]


def _full(model: ModelConfig, number: int) -> AttentionLayer:
    name = f"model.layers.{number}.self_attn.attn"
    return AttentionLayer(name=name, kind="attention", kv_heads=model.heads, head_size=model.head_size)


def _window(model: ModelConfig, number: int) -> WindowLayer:
    return WindowLayer(
        name=f"model.layers.{number}.self_attn.attn",
        kind="sliding_window",
        kv_heads=model.heads,
        head_size=model.head_size,
        window=model.count("sliding_window"),
    )


_ATTENTION: Final[Mapping[str, Callable[[ModelConfig, int], Layer]]] = {
    "sliding_attention": _window,
    "full_attention": _full,
}
"""By the names of `layer_types`."""


def _dense(model: ModelConfig, cache_dtype: str) -> Iterator[Layer]:  # noqa: ARG001 - as the other rules
    if model.fields.get("use_sliding_window") or "sliding_attention" in (model.fields.get("layer_types") or ()):
        raise ConfigError(
            f"config.json: this {model.family} model uses sliding windows, which are known here for "
            f"{', '.join(sorted(_WINDOWED))} only; describe its layers in a case file instead"
        )
    yield from (_full(model, number) for number in model.layers)


def _one_window(model: ModelConfig, cache_dtype: str) -> Iterator[Layer]:  # noqa: ARG001 - as the other rules
    """`sliding_window` for all layers, unless `layer_types` picks some; 0 or null is none."""
    window = "sliding_attention" if model.fields.get("sliding_window") else "full_attention"
    yield from _by_kind(model, model.kinds(lambda _: window), _ATTENTION)


def _every_other(model: ModelConfig, cache_dtype: str) -> Iterator[Layer]:  # noqa: ARG001 - as the other rules
    """Every other layer, whatever `layer_types` says, as in vLLM (`gpt_oss.py`)."""
    yield from (_window(model, number) if number % 2 == 0 else _full(model, number) for number in model.layers)


def _windowed(default: Callable[[ModelConfig, int], bool]) -> Rule:
    """Windows where `layer_types` says so, or by the family's own pattern."""

    def rule(model: ModelConfig, cache_dtype: str) -> Iterator[Layer]:  # noqa: ARG001 - as the other rules
        kinds = model.kinds(lambda number: "sliding_attention" if default(model, number) else "full_attention")
        yield from _by_kind(model, kinds, _ATTENTION)

    return rule


def _by_kind(
    model: ModelConfig, kinds: Sequence[str], makers: Mapping[str, Callable[[ModelConfig, int], Layer]]
) -> Iterator[Layer]:
    for number, kind in enumerate(kinds):
        if kind not in makers:
            raise ConfigError(f"config.json: layer {number} is of type {kind!r}; known: {', '.join(makers)}")
        yield makers[kind](model, number)


def _even(_: ModelConfig, number: int) -> bool:
    return number % 2 == 0


def _gemma3_pattern(model: ModelConfig, number: int) -> bool:
    pattern = model.count("sliding_window_pattern") if "sliding_window_pattern" in model.fields else 6
    return (number + 1) % pattern != 0


def _latent(model: ModelConfig, cache_dtype: str) -> Iterator[Layer]:
    """MLA: one row of latent and rotary channels a token."""
    if model.fields.get("index_topk") is not None:
        raise ConfigError(
            f"config.json: this {model.family} model has an indexer (index_topk); its model_type should be deepseek_v32"
        )
    yield from (_latent_layer(model, number, cache_dtype) for number in model.layers)


def _latent_layer(model: ModelConfig, number: int, cache_dtype: str) -> WholeLayer:
    row = model.count("kv_lora_rank") + model.count("qk_rope_head_dim")
    name = f"model.layers.{number}.self_attn.attn"
    return WholeLayer(name=name, kind="mla", bytes_per_token=row * DTYPE_BYTES[cache_dtype])


def _sparse_latent(model: ModelConfig, cache_dtype: str) -> Iterator[Layer]:
    """DeepSeek V3.2: beside the latents each layer has an indexer's fp8 keys with their scales."""
    if DTYPE_BYTES[cache_dtype] == 1:
        raise ConfigError(
            f"{model.family} packs latents of {cache_dtype} in a format of its own (fp8_ds_mla), which is not known "
            "here; use bfloat16, or describe the layers in a case file"
        )
    if model.fields.get("index_topk_freq", 1) != 1 or model.fields.get("index_topk_pattern") is not None:
        raise ConfigError(
            "config.json: index_topk_freq or index_topk_pattern shares an indexer among layers, which is not known "
            "here; describe the layers in a case file instead"
        )
    width = model.count("index_head_dim")
    row = width + width // INDEXER_BLOCK * 4
    for number in model.layers:
        yield _latent_layer(model, number, cache_dtype)
        name = f"model.layers.{number}.self_attn.indexer.k_cache"
        yield WholeLayer(name=name, kind="replicated", bytes_per_token=row)


def _delta_net(model: ModelConfig, cache_dtype: str) -> Iterator[Layer]:  # noqa: ARG001 - as the other rules
    """Qwen3-Next and Qwen3.5: full attention in every fourth layer."""
    interval = model.count("full_attention_interval") if "full_attention_interval" in model.fields else 4
    kinds = model.kinds(lambda number: "linear_attention" if (number + 1) % interval else "full_attention")
    yield from _by_kind(model, kinds, {"linear_attention": _delta_layer, "full_attention": _full})


def _delta_layer(model: ModelConfig, number: int) -> GatedDeltaNetLayer:
    state = model.fields.get("mamba_ssm_dtype") if model.family.startswith("qwen3_5") else None
    return GatedDeltaNetLayer(
        name=f"model.layers.{number}.linear_attn",
        kind="gdn",
        key_heads=model.count("linear_num_key_heads"),
        value_heads=model.count("linear_num_value_heads"),
        key_head_size=model.count("linear_key_head_dim"),
        value_head_size=model.count("linear_value_head_dim"),
        conv_kernel=model.count("linear_conv_kernel_dim"),
        conv_dtype=model.dtype,
        state_dtype=model.dtype if state is None else str(state),
    )


_WINDOWED: Final[Mapping[str, Rule]] = {
    "gemma2": _windowed(_even),
    "gemma3": _windowed(_gemma3_pattern),
    "gemma3_text": _windowed(_gemma3_pattern),
    "gpt_oss": _every_other,
    "mistral": _one_window,
    "mixtral": _one_window,
    "phi3": _one_window,
}
FAMILIES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "granite"), _dense),
    **_WINDOWED,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _latent),
    "deepseek_v32": _sparse_latent,
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _delta_net),
}
"""By `model_type`."""
