"""Seeded tiny models of the layer kinds that `examples/tiny_model.py` does not have, saved by `transformers`.

Random weights tell right KV from wrong only where attention is sharp: the projections that make queries are
scaled up, so that every answer depends on which key and value stood where.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from serve_1p1d import BUILD
from tiny_model import TinyModel, built_once, save_tokenizer

SEED = 20_261_201
VOCABULARY = TinyModel().vocabulary
"""That of `tests.e2e.pair.new_prompt`."""
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "dtype": "float32",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridHeads:
    """Heads of the hybrid model, and channels of each."""

    kv: int = 2
    kv_width: int = 64
    state_keys: int = 4
    state_values: int = 8
    state_width: int = 64


HYBRID_HEADS = HybridHeads()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A tiny model: how it is drawn, and what its engines need besides it."""

    name: str
    draw: Callable[[int], Any]
    """The end token's id -> a `transformers` model in float32."""
    block_size: int = 32
    arguments: tuple[str, ...] = ()
    """Of both engines, after `CPU_ARGUMENTS`."""

    @property
    def key(self) -> str:
        """Eight hex digits that stand for what `draw` does."""
        text = repr((COMMON, HYBRID_HEADS, SEED, inspect.getsource(self.draw)))
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def ensure(self, models: Path = BUILD / "models") -> Path:
        """Return the model's folder; build it there if it is not complete yet."""
        return built_once(models / f"tiny-{self.name}-{self.key}", partial(save, self.draw))


def save(draw: Callable[[int], Any], folder: Path) -> None:
    """Draw a model from `SEED` and save it with a tokenizer."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    end_token = save_tokenizer(folder, VOCABULARY)
    torch.manual_seed(SEED)
    draw(end_token).save_pretrained(folder)


def draw_mla(end_token: int) -> Any:
    """DeepSeek-V2's attention: one latent row a token, whatever the heads; all MLPs dense.

    CPU_MLA has kernels for rows of 512 + 64 values only.
    """
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    layers = 3
    config = DeepseekV2Config(
        **COMMON,
        eos_token_id=end_token,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
    )
    model = DeepseekV2ForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(2.0)
    return model


def draw_windowed(end_token: int) -> Any:
    """Gemma 3's attention: of four layers, every second sees the last 64 tokens only."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **COMMON,
        eos_token_id=end_token,
        pad_token_id=None,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    model = Gemma3ForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(2.0)  # the norm multiplies by 1 + weight
    return model


def draw_hybrid(end_token: int) -> Any:
    """Qwen3-Next: three gated-delta-net layers and one of attention, with experts; its weight norms add one.

    vLLM's CPU kernels for gated delta nets take bfloat16 only.
    """
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **{**COMMON, "dtype": "bfloat16"},
        eos_token_id=end_token,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=HYBRID_HEADS.kv,
        head_dim=HYBRID_HEADS.kv_width,
        linear_num_key_heads=HYBRID_HEADS.state_keys,
        linear_num_value_heads=HYBRID_HEADS.state_values,
        linear_key_head_dim=HYBRID_HEADS.state_width,
        linear_value_head_dim=HYBRID_HEADS.state_width,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    model = Qwen3NextForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        model.model.layers[-1].self_attn.q_norm.weight.fill_(2.0)
    return model


MLA = Kind(
    name="mla",
    draw=draw_mla,
    block_size=16,  # the only one of CPU_MLA
    # vLLM 0.32's CPU rotary kernel is wrong for the single key head of MLA; the PyTorch one is right.
    arguments=("--compilation-config", '{"custom_ops": ["all", "-rotary_embedding"]}'),
)
WINDOWED = Kind(name="windowed", draw=draw_windowed)
HYBRID = Kind(name="hybrid", draw=draw_hybrid, arguments=("--dtype", "bfloat16"))
