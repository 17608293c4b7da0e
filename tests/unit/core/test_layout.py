"""core/layout.py: all orders parse, strides and head order follow from the name, fallback keeps the order."""

from __future__ import annotations

from itertools import permutations

import pytest

from mooncake_hetero_tp.core.layout import DIMS, VLLM_LAYOUTS, KVLayout, keep_order_fallback, preference_order
from mooncake_hetero_tp.errors import ConfigError, LocalUsageError

ALL_ORDERS = ["".join(order) for order in permutations(DIMS)]
COUNTS = {"L": 3, "B": 5, "H": 2, "N": 4, "C": 8}
STRIDES = {
    "LBHNC": (320, 64, 32, 8, 1),
    "LBNHC": (320, 64, 8, 16, 1),
    "LHBNC": (320, 32, 160, 8, 1),
    "BLHNC": (64, 192, 32, 8, 1),
    "BLNHC": (64, 192, 8, 16, 1),
    "BHLNC": (32, 192, 96, 8, 1),
}
HEAD_MAJOR = {"LBHNC", "LHBNC", "BLHNC", "BHLNC"}


def strides_by_walk(name: str, counts: dict[str, int]) -> dict[str, int]:
    """The definition: a dim's stride is the product of the counts of all dims further in."""
    strides = {}
    for place, dim in enumerate(name):
        stride = 1
        for inner in name[place + 1 :]:
            stride *= counts[inner]
        strides[dim] = stride
    return strides


@pytest.mark.parametrize("name", ALL_ORDERS)
def test_every_order_parses(name: str) -> None:
    layout = KVLayout.from_name(name)
    assert "".join(layout.order) == str(layout) == name
    assert [layout.position(dim) for dim in name] == [0, 1, 2, 3, 4]
    assert layout.strides(COUNTS, 1) == strides_by_walk(name, COUNTS)
    assert layout.is_head_major == (name.index("H") < name.index("N"))
    assert layout.is_content_innermost == (name[-1] == "C")
    assert layout.is_page_outermost == (name[:2] in {"LB", "BL"})
    assert layout.is_page_splittable == (name[:2] == "LB")


def test_there_are_120_orders() -> None:
    assert len(ALL_ORDERS) == len(set(ALL_ORDERS)) == 120


@pytest.mark.parametrize("name", VLLM_LAYOUTS)
def test_strides_of_vllm_layouts(name: str) -> None:
    layout = KVLayout.from_name(name)
    assert tuple(layout.strides(COUNTS, 1)[dim] for dim in DIMS) == STRIDES[name]
    assert layout.is_head_major == (name in HEAD_MAJOR)
    assert layout.strides(COUNTS, 2) == {dim: 2 * stride for dim, stride in layout.strides(COUNTS, 1).items()}


def test_head_major_is_asked_of_any_order() -> None:
    assert KVLayout.from_name("LHNBC").is_head_major
    assert not KVLayout.from_name("NLBHC").is_head_major


@pytest.mark.parametrize("name", ["", "LBHN", "LBHNCC", "LBHNN", "lbhnc", "NHD", "HND", "LBHNX", "L B H N C"])
def test_anything_else_is_refused_with_the_legal_dims(name: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        KVLayout.from_name(name)
    text = str(refusal.value)
    assert repr(name) in text
    assert all(dim in text for dim in DIMS)
    assert "LBHNC" in text


@pytest.mark.parametrize("dim", ["", "X", "LB", "l"])
def test_position_of_an_unknown_dim(dim: str) -> None:
    with pytest.raises(LocalUsageError, match="L, B, H, N, C"):
        KVLayout.from_name("LBHNC").position(dim)


@pytest.mark.parametrize(
    "counts, item_bytes",
    [({**COUNTS, "H": 0}, 1), (COUNTS, 0), ({"L": 1, "B": 1}, 1), ({**COUNTS, "X": 1}, 1)],
)
def test_strides_of_impossible_sizes(counts: dict[str, int], item_bytes: int) -> None:
    with pytest.raises(LocalUsageError):
        KVLayout.from_name("LBHNC").strides(counts, item_bytes)


@pytest.mark.parametrize(
    "name,strides",
    [
        ("LBHNC", (400, 80, 32, 8, 1)),
        ("LBNHC", (400, 80, 8, 16, 1)),
        ("BLHNC", (80, 240, 32, 8, 1)),
        ("BLNHC", (80, 240, 8, 16, 1)),
    ],
)
def test_padding_lies_between_pages_only(name: str, strides: tuple[int, ...]) -> None:
    """A page of 64 bytes in 80: heads stay 32 bytes apart (vllm#52516 took them from the padded page)."""
    layout = KVLayout.from_name(name)
    assert tuple(layout.strides(COUNTS, 1, page_bytes=80).values()) == strides
    assert layout.strides(COUNTS, 1, page_bytes=64) == layout.strides(COUNTS, 1)
    with pytest.raises(ConfigError, match=r"64 bytes .* 63 bytes"):
        layout.strides(COUNTS, 1, page_bytes=63)


@pytest.mark.parametrize("name", ["LHBNC", "BHLNC", "LHNBC"])
def test_pages_that_are_no_single_run_are_not_padded(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        KVLayout.from_name(name).strides(COUNTS, 1, page_bytes=80)


@pytest.mark.parametrize(
    "requested, candidates, taken",
    [
        ("LBHNC", ["BLNHC", "BLHNC"], "BLHNC"),  # the hybrid model that started this
        ("LBHNC", ["BLNHC", "LBNHC"], "BLNHC"),  # nothing head-major: the backends' own first choice
        ("LBNHC", ["BLHNC", "BLNHC"], "BLNHC"),
        ("LBNHC", ["BLHNC", "LHBNC"], "BLHNC"),
        ("BLHNC", ["LBNHC", "LHBNC", "LBHNC"], "LHBNC"),
        ("LHNBC", ["LBNHC", "LBHNC"], "LBHNC"),  # a request need not be one of vLLM's six
    ],
)
def test_fallback_keeps_the_head_token_order(requested: str, candidates: list[str], taken: str) -> None:
    assert keep_order_fallback(requested, candidates) == taken
    assert preference_order(requested, candidates)[0] == taken


def test_preference_order_puts_a_candidate_that_was_asked_for_first() -> None:
    assert preference_order("BLHNC", ["LBNHC", "LBHNC", "BLHNC", "BLNHC"]) == ["BLHNC", "LBHNC", "LBNHC", "BLNHC"]


@pytest.mark.parametrize("requested", VLLM_LAYOUTS)
def test_preference_order_is_a_stable_permutation(requested: str) -> None:
    for candidates in permutations(VLLM_LAYOUTS):
        ordered = preference_order(requested, candidates)
        assert ordered[0] == requested
        rest = [name for name in candidates if name != requested]
        same = [name for name in rest if (name in HEAD_MAJOR) == (requested in HEAD_MAJOR)]
        assert ordered[1:] == same + [name for name in rest if name not in same]
        assert preference_order(requested, ordered) == ordered


def test_fallback_needs_candidates_and_real_names() -> None:
    with pytest.raises(LocalUsageError, match="LBHNC"):
        keep_order_fallback("LBHNC", [])
    with pytest.raises(ConfigError, match="HND"):
        keep_order_fallback("HND", ["LBHNC"])
    with pytest.raises(ConfigError, match="NHD"):
        preference_order("LBHNC", ["NHD"])
