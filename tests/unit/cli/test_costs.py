"""The mode of a case: by its busiest consumer rank, and direct where a slot is too small."""

from __future__ import annotations

from mooncake_hetero_tp.cli.costs import Terms
from mooncake_hetero_tp.core.cost import Mode
from tests.plan_cases import Json, ask, attention, layers, make_case, side


def _case(head_size: int) -> Json:
    request = {"tokens": 2, "producer_blocks": [[1]], "consumer_blocks": [[2]]}
    of = [attention("wide", 1, head_size), attention("small", 1, 1)]
    return make_case(side(num_blocks=4), side(num_blocks=4), of, request)


def test_a_slot_too_small_for_a_token_leaves_direct() -> None:
    case = _case(1 << 18)  # K and V of one token: 1 MiB
    assert ask(case, Mode.STAGED, slot_mib=1)["mode"] == "staged"
    found = ask(_case((1 << 18) + 1), Mode.STAGED, slot_mib=1)
    assert (found["mode"], found["pulls"][0]["descriptors"]) == ("direct", 2)
    assert "not staged because a piece of 1048580 bytes stays whole and a slot holds 1048576" in found["why"]
    assert found["why"].startswith("direct: about 1.31 ms in 2 descriptors; ")


def test_the_busiest_consumer_rank_decides() -> None:
    # Two stages: the first one's four layers are many pieces, the second one's is one.
    request = {"tokens": 64, "producer_blocks": [[0]], "consumer_blocks": [[0]]}
    of = [*layers(4, kv_heads=2), attention("last", 1, 128)]
    sides = [side(block_size=64, layout=layout, pp=pp) for layout, pp in (("LBNHC", 1), ("LBHNC", 5))]
    found = ask(make_case(sides[0], sides[1], of, request))
    assert found["mode"] == "staged"
    assert "128 descriptors, for the 65536 bytes of the busiest consumer rank, pp0.tp0" in found["why"]
    assert [pull["descriptors"] for pull in found["pulls"]] == [1] * 5


def test_descriptors_of_a_prediction_are_those_of_its_mode() -> None:
    case = make_case(side(), side(2, "BLNHC", 1024), layers(8))
    counts = {mode: [one["descriptors"] for one in ask(case, mode)["predicted"]["pulls"]] for mode in Mode}
    assert counts == {Mode.AUTO: [2, 2], Mode.STAGED: [2, 2], Mode.DIRECT: [8 * 1024 * 4] * 2}


def test_slots_larger_than_a_read_take_several() -> None:
    case = make_case(side(), side(1, "BLNHC", 4096), layers(40))
    pulls = ask(case, Mode.STAGED, slot_mib=1024)["predicted"]["pulls"]
    assert [(pull["descriptors"], pull["bytes"]) for pull in pulls] == [(10, 640 << 20)]


def test_the_ring_is_the_connectors() -> None:
    assert [Terms(slot_mib=size).slots for size in (8, 32, 64, 100)] == [8, 2, 1, 1]
