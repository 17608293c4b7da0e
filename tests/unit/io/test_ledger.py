from __future__ import annotations

from mooncake_hetero_tp.io.ledger import Ledger
from mooncake_hetero_tp.io.work import Finished
from mooncake_hetero_tp.types import RequestId

A, B, C = (RequestId(name) for name in "abc")


def test_everything_is_reported_once() -> None:
    ledger = Ledger()
    ledger.open([A], [B, C])
    assert ledger.collect() == Finished()
    assert ledger.sent(A)
    assert ledger.loaded(B, failed=False)
    assert ledger.loaded(C, failed=True)
    assert ledger.collect() == Finished(sending={A}, recving={B, C}, failed={C})
    assert not ledger.sent(A)
    assert not ledger.loaded(C, failed=False)
    assert ledger.collect() == Finished()


def test_what_nobody_waits_for_is_not_reported() -> None:
    """finished_sending of a request that vLLM does not know kills its scheduler."""
    ledger = Ledger()
    assert not ledger.sent(A)
    assert not ledger.loaded(A, failed=True)
    assert ledger.collect() == Finished()


def test_what_is_withdrawn_is_never_reported() -> None:
    ledger = Ledger()
    ledger.open([A], [B, C])
    ledger.loaded(B, failed=True)
    ledger.withdraw([A], [B])
    assert ledger.collect() == Finished()
    assert not ledger.sent(A)
    assert ledger.loading() == {C}


def test_open_requests_are_known() -> None:
    ledger = Ledger()
    ledger.open([A], [B])
    ledger.loading().clear()
    assert (ledger.kept(), ledger.loading()) == ({A}, {B})
