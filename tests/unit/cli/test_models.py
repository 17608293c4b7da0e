"""cli/models.py: configs of each family, and what is refused by name."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mooncake_hetero_tp.cli.layers import GatedDeltaNetLayer, WholeLayer, WindowLayer
from mooncake_hetero_tp.cli.models import FAMILIES, model_layers, read_model
from mooncake_hetero_tp.errors import ConfigError

DENSE: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 12, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
MLA: dict[str, Any] = DENSE | {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
SPARSE: dict[str, Any] = MLA | {"model_type": "deepseek_v32", "index_topk": 2048, "index_head_dim": 128}
HYBRID: dict[str, Any] = DENSE | {
    "model_type": "qwen3_next", "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_key_value_heads": 2, "head_dim": 256,
}  # fmt: skip


def write(tmp_path: Path, config: object) -> Path:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return tmp_path


def kinds(tmp_path: Path, config: object) -> str:
    """One letter a layer: a(ttention), s(liding window), m(la), r(eplicated), g(dn)."""
    return "".join(layer.kind[0] for layer in model_layers(read_model(write(tmp_path, config)), "bfloat16"))


@pytest.mark.parametrize(
    "change,expected",
    [
        ({}, "a" * 12),
        ({"model_type": "mistral", "sliding_window": 4096}, "s" * 12),
        ({"model_type": "mistral", "sliding_window": None}, "a" * 12),
        ({"model_type": "gemma2", "sliding_window": 4096}, "sa" * 6),
        ({"model_type": "gemma3_text", "sliding_window": 512}, "sssssa" * 2),
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 4}, "sssa" * 3),
        ({"model_type": "gpt_oss", "sliding_window": 128}, "sa" * 6),
        ({"model_type": "gpt_oss", "sliding_window": 128, "layer_types": ["full_attention"] * 12}, "sa" * 6),
        ({"model_type": "phi3", "sliding_window": 2047}, "s" * 12),
        ({"model_type": "mixtral", "sliding_window": 0}, "a" * 12),
        (
            {"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 6},
            "as" * 6,
        ),
        (MLA, "m" * 12),
        (MLA | {"model_type": "kimi_k2"}, "m" * 12),
        (SPARSE, "mr" * 12),
        (HYBRID, "ggga" * 3),
        (HYBRID | {"model_type": "qwen3_5_moe_text", "full_attention_interval": 3}, "gga" * 4),
        ({"model_type": "gemma3", "text_config": DENSE | {"model_type": "gemma3_text", "sliding_window": 8}}, "sssssa" * 2),
    ],
)  # fmt: skip
def test_kinds_of_layers(change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert kinds(tmp_path, DENSE | change) == expected


def test_sizes(tmp_path: Path) -> None:
    first = {name: model_layers(read_model(write(tmp_path, config)), "bfloat16") for name, config in (
        ("dense", DENSE), ("window", DENSE | {"model_type": "gpt_oss", "sliding_window": 128}), ("sparse", SPARSE),
        ("hybrid", HYBRID | {"model_type": "qwen3_5_text", "mamba_ssm_dtype": "float32"}),
    )}  # fmt: skip
    assert first["dense"][0].name == "model.layers.0.self_attn.attn"
    assert (getattr(first["dense"][0], "kv_heads", 0), getattr(first["dense"][0], "head_size", 0)) == (8, 128)
    window, latent, index, state = (
        first["window"][0], first["sparse"][0], first["sparse"][1], first["hybrid"][0],
    )  # fmt: skip
    assert isinstance(window, WindowLayer)
    assert window.window == 128
    assert isinstance(latent, WholeLayer)
    assert isinstance(index, WholeLayer)
    assert (latent.bytes_per_token, index.bytes_per_token) == (1152, 132)
    assert isinstance(state, GatedDeltaNetLayer)
    assert (state.key_heads, state.value_heads, state.conv_kernel) == (16, 32, 4)
    assert (state.conv_dtype, state.state_dtype) == ("bfloat16", "float32")
    assert Counter(len({layer.name for layer in layers}) for layers in first.values()) == Counter([12, 12, 24, 12])


def read_all(directory: Path) -> None:
    model = read_model(directory)
    assert model.dtype
    model_layers(model, "bfloat16")


@pytest.mark.parametrize(
    "config,words",
    [
        ("{", ["config.json"]),
        ([1], ["list"]),
        ({}, ["model_type ''", *FAMILIES]),
        (
            DENSE | {"model_type": "rwkv7", "architectures": ["RWKV7ForCausalLM"]},
            ["'rwkv7'", "RWKV7ForCausalLM", "llama"],
        ),
        (DENSE | {"num_hidden_layers": None}, ["num_hidden_layers", "default of transformers"]),
        (DENSE | {"num_hidden_layers": "12"}, ["num_hidden_layers", "'12'"]),
        (DENSE | {"num_hidden_layers": 10**6}, ["num_hidden_layers", "4096"]),
        (DENSE | {"torch_dtype": "int4"}, ["int4"]),
        (DENSE | {"model_type": "qwen2", "use_sliding_window": True}, ["qwen2", "sliding windows", "gemma3"]),
        (DENSE | {"model_type": "gemma2"}, ["sliding_window"]),
        (
            DENSE | {"model_type": "gemma3_text", "sliding_window": 8, "layer_types": ["chunked"] * 12},
            ["layer 0", "chunked"],
        ),
        (DENSE | {"model_type": "gemma2", "sliding_window": 8, "layer_types": ["full_attention"]}, ["layer_types"]),
        (MLA | {"index_topk": 2048}, ["indexer", "deepseek_v32"]),
        (SPARSE | {"index_topk_freq": 4}, ["index_topk_freq"]),
    ],
)
def test_what_is_not_known_is_refused_by_name(config: object, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as found:
        read_all(write(tmp_path, config))
    for word in words:
        assert word in str(found.value)


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_model(tmp_path / "nowhere")


def test_sparse_latents_of_fp8_are_refused(tmp_path: Path) -> None:
    model = read_model(write(tmp_path, SPARSE))
    with pytest.raises(ConfigError, match="fp8_ds_mla"):
        model_layers(model, "fp8")
