"""The proxy dialects of the field as functions: what each writes into `kv_transfer_params`, and in which order.

vLLM's mooncake example proxy and llm-d's `mooncake` ask both engines at once; vLLM's NIXL proxies ask
the producer first and hand the consumer what the producer returned.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from client import Answer, complete, fetch
from deployment import EngineConfig

Body = Mapping[str, object]


def engine_id(producer: EngineConfig) -> str:
    """What the producer's bootstrap server says of its only data-parallel rank."""
    ranks = json.loads(fetch(f"{producer.bootstrap}/query").body)
    return str(ranks["0"]["engine_id"])


def prefill_body(body: Body, params: Mapping[str, object]) -> dict[str, object]:
    """The producer's half: one token, and the order to keep the KV."""
    remote = {"do_remote_decode": True, "do_remote_prefill": False, **params}
    return {**body, "max_tokens": 1, "kv_transfer_params": remote}


def decode_body(body: Body, producer: EngineConfig, transfer_id: str, **changed: object) -> dict[str, object]:
    """The consumer's half in the mooncake dialect; `changed` replaces or adds parameters."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_bootstrap_addr": producer.bootstrap,
        "remote_engine_id": engine_id(producer) if "remote_engine_id" not in changed else None,
        "transfer_id": transfer_id,
        **changed,
    }
    return {**body, "kv_transfer_params": params}


def new_transfer_id() -> str:
    return f"xfer-{uuid.uuid4()}"


def both_at_once(producer: EngineConfig, consumer: EngineConfig, body: Body) -> Answer:
    """Mooncake example proxy: both engines get their half at the same time."""
    transfer_id = new_transfer_id()
    with ThreadPoolExecutor(2) as pool:
        prefill = pool.submit(complete, producer.url, prefill_body(body, {"transfer_id": transfer_id}))
        answer = pool.submit(complete, consumer.url, decode_body(body, producer, transfer_id))
    assert prefill.result().error is None, prefill.result().error
    return answer.result()


def producer_first(producer: EngineConfig, consumer: EngineConfig, body: Body) -> Answer:
    """NIXL-style proxy: nulls to the producer, and what it returned, verbatim, to the consumer."""
    nulls = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    prefill = complete(producer.url, prefill_body(body, nulls))
    assert prefill.error is None, prefill.error
    assert prefill.transfer_params, "the producer returned no kv_transfer_params"
    return complete(consumer.url, {**body, "kv_transfer_params": dict(prefill.transfer_params)})
