"""A connector for test engines that writes down what their caches hold: kept prompts, and loads that ended.

Loaded by `kv_connector_module_path=tests.e2e.witness`; the package itself has no such hook. A rank writes one file a
request into the folder `E2E_WITNESS`: layer -> tensors, states as vLLM's own layers see them, keys and values by the
page content of vLLM's CPU attention. No code of the package says here where anything lies.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import MambaSpec

from mooncake_hetero_tp.connector import MooncakeHeteroTPConnector
from mooncake_hetero_tp.vllm_adapter.metadata import StepMetadata

FOLDER_SETTING = "E2E_WITNESS"
Held = dict[str, tuple[torch.Tensor, ...]]
"""Layer -> keys and values `[heads, tokens, channels]`, or the state's tensors as the layer has them in one slot."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """One request's blocks by group, and how many of its tokens they stand for."""

    transfer_id: str
    blocks: Sequence[npt.NDArray[np.integer]]
    tokens: int


class WitnessConnector(MooncakeHeteroTPConnector):
    """The connector under test, and what it leaves in the caches."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._forward_context = vllm_config.compilation_config.static_forward_context
        self._views: dict[str, torch.Tensor] = {}
        self._loading: dict[str, Seen] = {}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._views = kv_caches
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._connector_metadata
        if isinstance(step, StepMetadata):
            for kept in step.kept:
                self._write("kept", Seen(kept.transfer_id, kept.blocks, kept.computed_tokens))
            for pull in step.pulls:
                self._loading[pull.request_id] = Seen(pull.transfer_id, pull.blocks, pull.ranges[0].end)
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving:
            seen = self._loading.pop(request_id)
            if request_id not in results.failed_recving:
                self._write("loaded", seen)
        return results

    def _write(self, what: str, seen: Seen) -> None:
        held: Held = {}
        for group, blocks in zip(self._kv_cache_config.kv_cache_groups, seen.blocks, strict=True):
            for name in group.layer_names:
                spec = group.kv_cache_spec
                held[name] = (
                    self._state(name, spec, blocks, seen.tokens)
                    if isinstance(spec, MambaSpec)
                    else self._keys_and_values(name, spec, blocks, seen.tokens)
                )
        path = Path(os.environ[FOLDER_SETTING], f"{what}-{seen.transfer_id}-{get_tensor_model_parallel_rank()}")
        torch.save(held, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)

    def _state(self, name: str, spec: Any, blocks: npt.NDArray[np.integer], tokens: int) -> tuple[torch.Tensor, ...]:
        """The state after `tokens`: vLLM continues from the slot of the last of them."""
        slot = int(blocks[(tokens - 1) // spec.block_size])
        assert slot != 0, "the null block holds no state"
        return tuple(tensor[slot].clone() for tensor in self._forward_context[name].kv_cache)

    def _keys_and_values(
        self, name: str, spec: Any, blocks: npt.NDArray[np.integer], tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A head's page is a half of keys `[channels, tokens]`, then one of values `[tokens, channels]`."""
        view = self._views[name]
        pages_per_block = spec.block_size // view.shape[2]
        pages = [
            int(block) * pages_per_block + page
            for block in blocks[: -(-tokens // spec.block_size)]
            for page in range(pages_per_block)
        ]
        heads, width = view.shape[1], spec.head_size
        halves = view[pages].reshape(len(pages), heads, 2, -1)
        keys = halves[:, :, 0].reshape(len(pages), heads, width, -1).permute(1, 0, 3, 2)
        values = halves[:, :, 1].reshape(len(pages), heads, -1, width).permute(1, 0, 2, 3)
        return tuple(part.reshape(heads, -1, width)[:, :tokens].clone() for part in (keys, values))  # type: ignore[return-value]
