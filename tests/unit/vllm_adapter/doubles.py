"""vLLM's own specs, allocation and views for made-up models; only the model and config objects are stand-ins."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from mooncake_hetero_tp.vllm_adapter.place import Engine, Place


@dataclass(frozen=True, kw_only=True)
class Model:
    """A uniform attention model as one TP rank sees it."""

    heads: int = 4
    head_size: int = 8
    layers: int = 2
    block_size: int = 16
    kernel_block_size: int | None = None
    num_blocks: int = 6
    dtype: torch.dtype = torch.float32
    layout: str = "LBHNC"
    tp_size: int = 1
    tp_rank: int = 0
    backend: str = "FLASH_ATTN"
    isa: str | None = None
    page_size_padded: int | None = None
    window: int | None = None

    @property
    def names(self) -> list[str]:
        return [f"model.layers.{index}.self_attn.attn" for index in range(self.layers)]

    @property
    def local_heads(self) -> int:
        return max(self.heads // self.tp_size, 1)

    def spec(self, **changes: Any) -> Any:
        """The per-layer spec vLLM would build."""
        kind = kinds.FullAttentionSpec if self.window is None else kinds.SlidingWindowSpec
        values: dict[str, Any] = {
            "block_size": self.block_size,
            "num_kv_heads": self.local_heads,
            "head_size": self.head_size,
            "dtype": self.dtype,
            "page_size_padded": self.page_size_padded,
        }
        if self.window is not None:
            values["sliding_window"] = self.window
        return kind(**(values | changes))

    def cache_config(self, spec: Any = None) -> Any:
        """A KVCacheConfig of one group, placed as vLLM places uniform layers in this layout."""
        spec = self.spec() if spec is None else spec
        layout = KVCacheLayout[self.layout]
        layer_stride, block_stride, *_ = kinds.compute_layout_strides(spec, self.num_blocks, self.layers, layout)
        tensor = kinds.KVCacheTensor(
            size=self.layers * self.num_blocks * spec.page_size_bytes,
            layers=self.names,
            layer_stride=layer_stride,
            block_stride=block_stride,
        )
        return kinds.KVCacheConfig(
            num_blocks=self.num_blocks,
            kv_cache_tensors=[tensor],
            kv_cache_groups=[kinds.KVCacheGroupSpec(self.names, spec)],
            kv_cache_layout=self.layout,
        )

    def allocate(self, config: Any) -> dict[str, torch.Tensor]:
        """The real allocation and views."""
        kernel = [self.kernel_block_size or self.block_size] * len(config.kv_cache_groups)
        views: dict[str, torch.Tensor] = allocate_kv_cache(
            config, torch.device("cpu"), KVCacheLayout[self.layout], kernel
        )
        return views

    def engine(self, config: Any) -> Engine:
        return Engine(
            vllm_config=self.vllm_config(),
            kv_cache_config=config,
            place=Place(tp_size=self.tp_size, tp_rank=self.tp_rank, pp_size=1),
        )

    def vllm_config(self) -> Any:
        return stub_vllm_config(self)


class Arch(SimpleNamespace):
    """Stands in for ModelArchitectureConfig, per-layer values included."""

    def __getitem__(self, index: int) -> Arch:
        per_layer = self.__dict__.get("per_layer_kv_heads")
        return self if per_layer is None else Arch(total_num_kv_heads=per_layer[index])


def attention_module(backend: str, isa: str | None) -> Any:
    """A layer as `static_forward_context` holds it."""
    module = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
    if isa is not None:
        module.isa = isa
    return module


def stub_vllm_config(model: Model, role: str = "kv_both", engine_id: str = "E", **extra: Any) -> Any:
    """What the adapter reads of a VllmConfig; `extra` are connector settings."""
    arch = Arch(total_num_hidden_layers=model.layers, total_num_kv_heads=model.heads, head_size=model.head_size)
    transfer = KVTransferConfig(
        kv_connector="MooncakeHeteroTPConnector",
        kv_role=role,
        engine_id=engine_id,
        kv_connector_extra_config=extra,
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(
            model_arch_config=arch, architectures=["TinyForCausalLM"], dtype=model.dtype, use_mla=False
        ),
        cache_config=SimpleNamespace(
            kv_cache_layout=model.layout,
            cache_dtype="auto",
            block_size=model.block_size,
            enable_prefix_caching=True,
        ),
        parallel_config=SimpleNamespace(
            data_parallel_index=0,
            data_parallel_rank_local=0,
            data_parallel_master_ip="127.0.0.1",
            pipeline_parallel_size=1,
        ),
        speculative_config=None,
        compilation_config=SimpleNamespace(
            static_forward_context={name: attention_module(model.backend, model.isa) for name in model.names}
        ),
    )
