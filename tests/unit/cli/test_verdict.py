from __future__ import annotations

import msgspec
import pytest

from mooncake_hetero_tp.cli import verdict
from mooncake_hetero_tp.cli.verdict import judge, judge_all, refused
from mooncake_hetero_tp.core.handshake import explain
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.errors import PlanError
from mooncake_hetero_tp.types import Mismatch, Rank, Severity
from tests.live import tables
from tests.tables import Dense

WIDE = Dense(8, layers=3, tokens=4, head_size=4, item=2)
HALF = Dense(8, tp=2, layers=3, tokens=8, head_size=4, item=2)


def test_two_engines_agree_on_the_bytes_of_all_layers_and_heads() -> None:
    found = judge(tables(WIDE), tables(HALF))
    assert found.status == "ok"
    assert found.agreement is not None
    assert found.agreement.bytes_per_token == 3 * 8 * 2 * 4 * 2
    assert (found.agreement.tp.producer, found.agreement.tp.consumer) == (1, 2)
    assert {one.severity for one in found.mismatches} <= {Severity.NOTE, Severity.STAGING}
    assert "tp" in {one.field for one in found.mismatches}


def test_a_refusal_lists_everything_in_the_words_of_the_log() -> None:
    found = judge(tables(WIDE), tables(HALF, dtype="float16"))
    assert (found.status, found.agreement) == ("refused", None)
    assert {"dtype", "model.kv_cache_dtype", "tp"} <= {one.field for one in found.mismatches}
    assert found.why == explain(found.mismatches)
    assert found.why.startswith("[refuse]")


def test_what_only_the_plan_sees_is_refused_too() -> None:
    """Each pair of ranks is fine; that nobody holds the upper half of the heads, only the cover knows."""
    lower = {Rank(): tables(HALF)[Rank()]}
    found = judge(lower, tables(HALF))
    assert found.status == "refused"
    assert "start every producer rank" in found.why


def test_engines_without_a_common_layer_do_not_agree() -> None:
    table = tables(WIDE)[Rank()]
    drafts = msgspec.structs.replace(table, draft_layers=tuple({region.layer for region in table.regions}))
    found = judge({Rank(): drafts}, {Rank(): msgspec.structs.replace(table, regions=())})
    assert (found.status, found.why) == ("refused", "the two engines share no layer")


def test_a_plan_that_cannot_be_proven_is_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(consumer: RankTable, plans: object) -> None:
        raise PlanError("a byte is missing")

    monkeypatch.setattr(verdict, "prove", fail)
    found = judge(tables(WIDE), tables(HALF))
    assert (found.status, found.why) == ("refused", "a byte is missing")


@pytest.mark.parametrize("bad_at", [0, 1])
def test_of_several_engines_one_refusal_decides(bad_at: int) -> None:
    consumers = [tables(HALF), tables(HALF)]
    consumers[bad_at] = tables(HALF, dtype="float16")
    found = judge_all((tables(WIDE), consumer) for consumer in consumers)
    assert (found.status, found.agreement) == ("refused", None)
    alone = judge(tables(WIDE), consumers[bad_at])
    assert set(found.mismatches) >= set(alone.mismatches)
    assert found.why == explain(found.mismatches)
    assert judge_all([(tables(WIDE), tables(HALF))] * 2) == judge(tables(WIDE), tables(HALF))


def test_like_refusals_are_told_once() -> None:
    one = Mismatch("tp", "TP1", "TP3", Severity.REFUSE, "no", "choose", "layers.0")
    found = refused([one, msgspec.structs.replace(one, layer="layers.1")])
    assert [same.layer for same in found.mismatches] == ["layers.0 and 1 more"]
    assert found.why == explain(found.mismatches)
