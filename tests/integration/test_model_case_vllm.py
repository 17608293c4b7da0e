"""Blocks and padding that `plan --model` sets for a hybrid, against what the installed vLLM sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from mooncake_hetero_tp.cli.model_case import model_case
from mooncake_hetero_tp.cli.wish import Wish

pytestmark = pytest.mark.vllm

STEP = 32
"""Tokens of the smallest kernel block of vLLM's CPU attention."""
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "dtype": "bfloat16",
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4, "max_position_embeddings": 2048, "vocab_size": 512, "intermediate_size": 128,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("block", [16, 96])
def test_blocks_of_a_hybrid_are_those_of_vllm(tp: int, block: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    settings: Any = {"mamba_ssm_cache_dtype": "bfloat16"}  # on CPU vLLM would take float32
    arguments = EngineArgs(
        model=str(tmp_path), skip_tokenizer_init=True, tensor_parallel_size=tp, enable_prefix_caching=False, **settings
    )
    theirs = arguments.create_engine_config()
    theirs.cache_config.block_size = block
    type(current_platform)._align_hybrid_block_size(theirs, CPUAttentionBackend)
    wish = Wish(tp=tp, block_size=(block,), kernel_block_size=(STEP,))
    ours = model_case(tmp_path, {"prefill": wish, "decode": wish}).case["producer"]
    assert ours["block_size"] == theirs.cache_config.block_size
    assert ours["page_size_padded"] == [theirs.cache_config.mamba_page_size_padded] * 3 + [None]
