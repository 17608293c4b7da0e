"""A vLLM attention backend in plain PyTorch that takes any KV cache layout: a third party's plugin, for tests.

vLLM finds it by the entry point beside this file wherever this folder is on the PYTHONPATH, and calls `register` in
every process. On CPU it stands in for CPU_ATTN, the only backend that vLLM's CPU platform selects and whose kernels
read pages of heads only. A page's content is one row a token and head, K then V; where rows are, the strides say.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import KVCacheLayout

NAME = "TEST_TORCH"
LAYOUTS_SETTING = "TORCH_ATTENTION_LAYOUTS"
"""The layouts that the backend says it can read, most preferred first and comma-separated."""
TOKEN_MAJOR_FIRST = "BLNHC,BLHNC"


def register() -> None:
    """Make the backend known, and CPU_ATTN too."""
    path = f"{__name__}.TorchAttention"
    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, path)
    register_backend(AttentionBackendEnum.CPU_ATTN, path)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """One request's part of a step."""

    first: int
    queries: int
    """Rows `[first, first + queries)` of the step's queries are the last tokens of the request so far."""
    tokens: int
    """Of the request so far, these queries among them."""
    pages: torch.Tensor
    """Kernel block ids `[pages]` from the request's first token on."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The attention metadata of one step."""

    chunks: tuple[Chunk, ...]
    slots: torch.Tensor
    """Where the step's tokens go: kernel block * tokens of a block + place in it `[tokens]`; -1: nowhere."""


class StepBuilder(AttentionMetadataBuilder):
    """vLLM's batch -> `Step`."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._page_tokens = int(kv_cache_spec.block_size)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,  # noqa: FBT002 - vLLM's signature
    ) -> Step:
        batch = common_attn_metadata
        starts = batch.query_start_loc_cpu.tolist()
        tokens = batch.seq_lens.tolist()
        chunks = (
            Chunk(
                first=starts[row],
                queries=starts[row + 1] - starts[row],
                tokens=tokens[row],
                pages=batch.block_table_tensor[row, : -(-tokens[row] // self._page_tokens)].long(),
            )
            for row in range(batch.num_reqs)
        )
        return Step(
            chunks=tuple(chunk for chunk in chunks if chunk.queries),
            slots=batch.slot_mapping[: batch.num_actual_tokens].long(),
        )


class TorchAttentionImpl(AttentionImpl):
    """Writes the step's keys and values into their pages, then attends over the pages of each request."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        *others: object,
    ) -> None:
        assert alibi_slopes is None
        assert sliding_window is None
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Step | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Args: queries, keys, values and output `[tokens, heads, D]`; cache `[pages, KV heads, tokens, 2 D]`."""
        if attn_metadata is None:  # a warm-up
            return output.zero_()
        store(kv_cache, key, value, attn_metadata.slots)
        for chunk in attn_metadata.chunks:
            rows = slice(chunk.first, chunk.first + chunk.queries)
            output[rows] = attend(query[rows], kv_cache, chunk, self.scale)
        return output


def store(kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Write rows of K then V `[tokens, KV heads, 2 D]` to their slots of the cache `[pages, KV heads, tokens, 2 D]`."""
    real = slots >= 0
    rows = torch.cat((key, value), dim=-1)[: len(slots)]
    page_tokens = kv_cache.shape[2]
    kv_cache[slots[real] // page_tokens, :, slots[real] % page_tokens] = rows[real]


def attend(query: torch.Tensor, kv_cache: torch.Tensor, chunk: Chunk, scale: float) -> torch.Tensor:
    """Causal attention of one request's queries `[queries, heads, D]` over its pages; as large as the queries."""
    pages = kv_cache[chunk.pages]
    rows = pages.transpose(1, 2).flatten(0, 1)[: chunk.tokens]
    rows = rows.repeat_interleave(query.shape[1] // rows.shape[1], dim=1)
    key, value = rows.chunk(2, dim=-1)
    scores = torch.einsum("qhd,thd->hqt", query, key) * scale
    places = torch.arange(chunk.tokens)
    unseen = places[None, :] > places[chunk.tokens - chunk.queries :, None]
    weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqt,thd->qhd", weights, value)


class TorchAttention(AttentionBackend):
    """The backend as vLLM sees it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[TorchAttentionImpl]:
        return TorchAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        names = os.environ.get(LAYOUTS_SETTING, TOKEN_MAJOR_FIRST)
        return tuple(KVCacheLayout[name] for name in names.split(","))
