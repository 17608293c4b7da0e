"""Clearing what lies past the end of a loaded range, in host memory, through the region's strides."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mooncake_hetero_tp.core.binding import TailView


class _Memory:
    """Bytes of this process as numpy's array interface describes them."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, False),
            "shape": shape,
            "strides": strides,
        }


def clear_host_tails(tails: Iterable[TailView]) -> None:
    """Zero each tail's elements and nothing between them; the regions must lie in host memory.

    vLLM does not zero blocks that a connector loads, so what another request left past the end could be
    attended (vllm#51527, vllm#54875).
    """
    for tail in tails:
        region = tail.region
        start = region.base + tail.page * region.block_stride + tail.first_token * region.token.stride
        shape = (region.unit.count, region.token.count - tail.first_token, region.channel.count, region.item_bytes)
        strides = (region.unit.stride, region.token.stride, region.channel.stride, 1)
        np.asarray(_Memory(start, shape, strides))[...] = 0
