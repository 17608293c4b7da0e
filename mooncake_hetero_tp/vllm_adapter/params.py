"""`kv_transfer_params`: what proxies send and what a producer answers.

    proxy                                    to the producer              to the consumer
    vLLM's example, vllm-router and llm-d    do_remote_decode,            do_remote_prefill, transfer_id,
    in their mooncake dialect                transfer_id                  remote_engine_id, remote_bootstrap_addr
    vllm-router nixl, llm-d nixlv2           do_remote_decode, null rest  the producer's answer, verbatim

Null counts as absent and unknown keys are ignored. The dict comes from a client and is shared by the
children of one `n > 1` request, so it is read once and never written to.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mooncake_hetero_tp.types import EngineId, TransferId

MAX_ID_LENGTH = 1024
"""Ids longer than this are not taken from a client."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillOrder:
    """Producer: prefill and keep the blocks; `transfer_id` is None where the proxy sent none."""

    transfer_id: TransferId | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RemotePrefill:
    """Consumer: the prompt's KV is, or will be, at this producer engine."""

    transfer_id: TransferId
    engine_id: EngineId
    bootstrap: str
    """`http://host:port`"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unusable:
    """Asked for a transfer, but not in a way that can work; `reason` says what is missing."""

    reason: str


Order = PrefillOrder | RemotePrefill | Unusable | None


def parse(params: object) -> Order:
    """What a request's `kv_transfer_params` ask for; None: nothing."""
    if not isinstance(params, Mapping):
        return None if params is None else Unusable(reason=f"expected an object, got {type(params).__name__}")
    if params.get("do_remote_prefill"):
        return _remote_prefill(params)
    if params.get("do_remote_decode"):
        transfer_id = params.get("transfer_id")
        if transfer_id is not None and not _is_id(transfer_id):
            return Unusable(reason=_complaint("transfer_id", transfer_id))
        return PrefillOrder(transfer_id=None if transfer_id is None else TransferId(transfer_id))
    return None


def answer(transfer_id: TransferId, engine_id: EngineId, bootstrap: str) -> dict[str, Any]:
    """What a producer's response carries, so that a proxy can hand it to a consumer verbatim."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_engine_id": engine_id,
        "remote_bootstrap_addr": bootstrap,
    }


def mint_transfer_id() -> TransferId:
    """A transfer id for a proxy that sent none."""
    return TransferId(f"mht-{uuid.uuid4()}")


def bootstrap_url(text: str) -> str:
    """A bootstrap address with a scheme and without a trailing slash."""
    text = text.strip().rstrip("/")
    return text if "://" in text else f"http://{text}"


def _remote_prefill(params: Mapping[str, object]) -> RemotePrefill | Unusable:
    keys = ("transfer_id", "remote_engine_id", "remote_bootstrap_addr")
    for key in keys:
        if not _is_id(params.get(key)):
            return Unusable(reason=_complaint(key, params.get(key)))
    transfer_id, engine_id, bootstrap = (str(params[key]) for key in keys)
    return RemotePrefill(
        transfer_id=TransferId(transfer_id), engine_id=EngineId(engine_id), bootstrap=bootstrap_url(bootstrap)
    )


def _is_id(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_ID_LENGTH


def _complaint(key: str, value: object) -> str:
    if value is None:
        return f"{key} is missing"
    return f"{key}: expected a string of 1 to {MAX_ID_LENGTH} characters, got {str(value)[:80]!r}"
