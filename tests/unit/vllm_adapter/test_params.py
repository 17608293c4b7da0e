"""params: both proxy dialects; null is absent, unknown keys are ignored, nothing from a client raises."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_hetero_tp.vllm_adapter.params import (
    MAX_ID_LENGTH,
    PrefillOrder,
    RemotePrefill,
    Unusable,
    answer,
    bootstrap_url,
    mint_transfer_id,
    parse,
)
from tests.unit.vllm_adapter.requests import DECODE, PREFILL

NIXL_TO_PRODUCER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def test_the_mooncake_dialect() -> None:
    assert parse(PREFILL) == PrefillOrder(transfer_id="t1")  # type: ignore[arg-type]
    order = parse(DECODE)
    assert isinstance(order, RemotePrefill)
    assert (order.transfer_id, order.engine_id, order.bootstrap) == ("t1", "P", "http://p0:8998")


def test_the_nixl_dialect_sends_no_transfer_id_and_returns_our_answer_verbatim() -> None:
    assert parse(NIXL_TO_PRODUCER) == PrefillOrder(transfer_id=None)
    transfer_id = mint_transfer_id()
    order = parse(answer(transfer_id, "P", "http://p0:8998") | {"unknown": 1})  # type: ignore[arg-type]
    assert isinstance(order, RemotePrefill)
    assert order.transfer_id == transfer_id


def test_minted_ids_are_unique() -> None:
    assert len({mint_transfer_id() for _ in range(100)}) == 100


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}, {"do_remote_prefill": None}, {"other": 1}])
def test_nothing_asked(params: Any) -> None:
    assert parse(params) is None


@pytest.mark.parametrize(
    "params,reason",
    [
        ("text", "expected an object, got str"),
        (DECODE | {"remote_engine_id": None}, "remote_engine_id is missing"),
        (DECODE | {"transfer_id": ""}, "transfer_id: expected a string"),
        (DECODE | {"remote_bootstrap_addr": 8998}, "got '8998'"),
        (DECODE | {"transfer_id": "x" * (MAX_ID_LENGTH + 1)}, "1 to 1024 characters"),
        (PREFILL | {"transfer_id": 7}, "transfer_id: expected a string"),
    ],
)
def test_unusable_params_say_why(params: Any, reason: str) -> None:
    order = parse(params)
    assert isinstance(order, Unusable)
    assert reason in order.reason


@pytest.mark.parametrize(
    "text,expected",
    [
        ("p0:8998", "http://p0:8998"),
        ("http://p0:8998/", "http://p0:8998"),
        (" https://p0:1 ", "https://p0:1"),
    ],
)
def test_bootstrap_addresses_get_a_scheme(text: str, expected: str) -> None:
    assert bootstrap_url(text) == expected
