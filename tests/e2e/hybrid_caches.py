"""The whole model's caches put together from what the ranks of the tiny hybrid's engines wrote down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.e2e.tiny_kinds import HYBRID_HEADS as HEADS

Whole = dict[str, torch.Tensor]
"""Name of a layer and of a tensor -> all heads or channels."""
PROJECTIONS = (
    HEADS.state_keys * HEADS.state_width,
    HEADS.state_keys * HEADS.state_width,
    HEADS.state_values * HEADS.state_width,
)
"""Channels of the convolution's queries, keys and values over all ranks; each rank holds a part of each."""


def transfers(folder: Path, what: str) -> set[str]:
    """Ids of the transfers of which something was `kept` or `loaded`."""
    return {path.name.removeprefix(f"{what}-").rpartition("-")[0] for path in _written(folder, what)}


def whole(folder: Path, what: str, transfer_id: str, tp_size: int) -> Whole:
    """What all ranks of an engine held of one request."""
    ranks = [torch.load(folder / f"{what}-{transfer_id}-{rank}") for rank in range(tp_size)]
    found: Whole = {}
    for layer in ranks[0]:
        first, second = ([rank[layer][number] for rank in ranks] for number in (0, 1))
        if layer.endswith("linear_attn"):
            found[f"{layer} convolution"] = _projections(first)
            found[f"{layer} state"] = torch.cat(second)
        else:
            found[f"{layer} keys"], found[f"{layer} values"] = torch.cat(first), torch.cat(second)
    return found


def differing(folder: Path, transfer_id: str, producer_tp: int, consumer_tp: int) -> list[str]:
    """Tensors of which consumer and producer do not hold the same bytes, or nothing at all."""
    kept = whole(folder, "kept", transfer_id, producer_tp)
    loaded = whole(folder, "loaded", transfer_id, consumer_tp)
    assert kept.keys() == loaded.keys()
    return [
        f"{transfer_id}: {name}"
        for name in kept
        if not kept[name].any() or not torch.equal(kept[name].view(torch.uint8), loaded[name].view(torch.uint8))
    ]


def _projections(ranks: Sequence[torch.Tensor]) -> torch.Tensor:
    """`[rows, channels]`, each rank's channels being its queries, keys and values in turn."""
    shares = [width // len(ranks) for width in PROJECTIONS]
    parts = zip(*(torch.split(rank, shares, dim=1) for rank in ranks), strict=True)
    return torch.cat([torch.cat(part, dim=1) for part in parts], dim=1)


def _written(folder: Path, what: str) -> list[Path]:
    return [path for path in folder.glob(f"{what}-*") if path.suffix != ".part"]
