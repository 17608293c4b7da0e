"""Legal values of the fields of a case, for all modules that read one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4, "float": 4,
    "bfloat16": 2, "float16": 2, "half": 2,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int8": 1, "uint8": 1,
}  # fmt: skip
"""Bytes of one value, under the names of vLLM's `--dtype` and `--kv-cache-dtype` and of torch."""

MAX_RANKS = 256
MAX_SIZE = 1 << 32
"""Far above any engine; keeps every offset inside 64 bits."""
MAX_CACHE_BYTES = 1 << 52
MAX_PAGE_PLACES = 1 << 22
"""Places (heads x tokens) of one page; the proof of a plan looks at each."""
MAX_STATE_VALUES = 1 << 24
"""Values of one state; the proof of a plan looks at each."""

Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)]
Index = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]
Parallel = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
GroupIndex = Annotated[int, msgspec.Meta(ge=0, le=1023)]
PerGroup = Count | list[Count]
SideName = Literal["producer", "consumer"]
Name = Annotated[str, msgspec.Meta(min_length=1)]
