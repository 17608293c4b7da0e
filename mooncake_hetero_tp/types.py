"""Identifiers, enums and small frozen records shared by every layer."""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

import msgspec

EngineId = NewType("EngineId", str)
"""vLLM's `kv_transfer_config.engine_id`; stable over restarts if the operator sets it."""
Incarnation = NewType("Incarnation", str)
"""16 hex digits drawn once per worker process; another value is another process."""
TransferId = NewType("TransferId", str)
"""Coordination id of one hand-over; minted by the router or by the producer."""
RequestId = NewType("RequestId", str)
"""A vLLM request id, local to one engine."""
SessionId = NewType("SessionId", int)
"""Drawn by a producer rank for one (consumer rank, producer rank, incarnations) handshake."""
PullId = NewType("PullId", int)
"""Drawn by a consumer rank for one (request, producer rank); unique in its session."""
Nonce = NewType("Nonce", int)
"""Drawn by a consumer rank for each Claim or Renew, so that an answer names its question."""


class Rank(msgspec.Struct, frozen=True, order=True):
    """Place of one worker in its engine (global data-parallel, pipeline, tensor rank)."""

    dp: int = 0
    pp: int = 0
    tp: int = 0

    def __str__(self) -> str:
        return f"dp{self.dp}.pp{self.pp}.tp{self.tp}"


class Identity(msgspec.Struct, frozen=True):
    """Who a worker is: engine, process incarnation, rank."""

    engine_id: EngineId
    incarnation: Incarnation
    rank: Rank

    def __str__(self) -> str:
        return f"{self.engine_id}[{self.incarnation}] {self.rank}"


class TokenRange(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Tokens `[start, end)` of a request, counted from its first prompt token."""

    start: int
    end: int

    @property
    def count(self) -> int:
        return max(self.end - self.start, 0)


class Encoding(StrEnum):
    """What lies where in a head's page, of those orders that are known (`vllm_adapter/encodings.py`)."""

    PACKED = "packed"
    """One row a token: K, then V."""
    HALVES = "halves.transposed_k"
    """K of all tokens as `[D][N]`, then V as `[N][D]`."""
    LATENT = "latent"
    """MLA: one latent row a token, the same on every TP rank."""


class Severity(StrEnum):
    """How a difference between two sides matters."""

    REFUSE = "refuse"
    """No transfer is possible; the pair is refused by name."""
    STAGING = "staging"
    """Possible, but only the staged executor would be fast."""
    NOTE = "note"
    """Harmless; listed so that a person sees it."""


class Mismatch(msgspec.Struct, frozen=True):
    """One difference between producer and consumer, with its effect and its remedy."""

    field: str
    producer: str
    consumer: str
    severity: Severity
    effect: str
    remedy: str
    layer: str | None = None

    def __str__(self) -> str:
        where = f"{self.layer}: " if self.layer else ""
        return (
            f"{where}{self.field}: producer has {self.producer}, consumer has {self.consumer}; "
            f"{self.effect}; {self.remedy}"
        )
