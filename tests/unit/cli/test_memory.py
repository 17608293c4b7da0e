"""cli/memory.py: stages, valid tables, and memories that cannot be, refused by name."""

from __future__ import annotations

import pytest

from mooncake_hetero_tp.cli.case import read_case
from mooncake_hetero_tp.cli.memory import engine_memory, stage_layers
from mooncake_hetero_tp.core.layout import VLLM_LAYOUTS
from mooncake_hetero_tp.core.tables import validate_table
from tests.plan_cases import ask, changed, example, random_case, side


@pytest.mark.parametrize(
    "count,pp,expected",
    [
        (8, 2, [4, 4]), (7, 2, [4, 3]), (10, 4, [2, 3, 3, 2]), (11, 4, [3, 3, 3, 2]), (9, 4, [2, 2, 3, 2]),
        (1, 2, [1, 0]), (2, 3, [1, 1, 0]), (61, 8, [7, 7, 8, 8, 8, 8, 8, 7]), (5, 1, [5]),
    ],
)  # fmt: skip
def test_stages_cut_the_list_as_vllm_does(count: int, pp: int, expected: list[int]) -> None:
    """Remaining layers go to the stages before the last, from the back."""
    cut = stage_layers(count, pp)
    assert [len(stage) for stage in cut] == expected
    assert [place for stage in cut for place in stage] == list(range(count))


def test_memories_are_valid_tables() -> None:
    for seed in range(25):
        case = read_case(random_case(seed))
        for name in case.sides:
            for memory in engine_memory(case, name).values():
                validate_table(memory.table)


@pytest.mark.parametrize(
    "path,value,field,words",
    [
        ("consumer.tp", 3, "tp", ["8 KV heads", "TP1", "TP3", "model.layers.0.self_attn.attn"]),
        ("producer.tp", 12, "tp", ["8 KV heads", "TP12"]),
        ("consumer.layout", "BLHCN", "layout", ["LBHNC", "BLHCN", "ends in C"]),
        ("producer.layout", "CLBHN", "layout", ["CLBHN", "BLHNC"]),
        ("producer", side(1, "LHBNC", page_size_padded=99999), "page_size_padded", ["99999 in LHBNC", "no padding"]),
        (
            "consumer",
            side(1, "BHLNC", 64, page_size_padded=999999),
            "page_size_padded",
            ["999999 in BHLNC", "no padding"],
        ),
        ("consumer", side(2, "BLHNC", 64, kernel_block_size=32), "kernel_block_size", ["32 of 64", "16 of 16"]),
        ("producer", side(1, "LHBNC", kernel_block_size=8), "kernel_block_size", ["8 of 16 tokens in LHBNC"]),
        ("producer", side(1, kernel_block_size=8, page_size_padded=99999), "kernel_block_size", ["padded"]),
    ],
)
def test_what_cannot_be_is_refused_by_name(path: str, value: object, field: str, words: list[str]) -> None:
    found = ask(changed(path, value))
    assert (found["status"], found["agreement"], found["mode"], found["pulls"]) == ("refused", None, None, [])
    assert [(one["field"], one["severity"]) for one in found["mismatches"]] == [(field, "refuse")]
    assert found["mismatches"][0]["effect"]
    assert found["mismatches"][0]["remedy"]
    for word in words:
        assert word in found["why"]


def test_all_refusals_come_at_once() -> None:
    case = example()
    case["producer"] |= {"layout": "LHBCN", "page_size_padded": 1, "kernel_block_size": 8}
    case["consumer"]["tp"] = 3
    found = ask(case)
    assert [one["field"] for one in found["mismatches"]] == ["layout", "page_size_padded", "kernel_block_size", "tp"]


def test_a_kernel_block_as_large_as_the_block_splits_nothing() -> None:
    for layout in VLLM_LAYOUTS:
        case = changed("consumer", side(2, layout, 64, kernel_block_size=64))
        assert ask(case)["pulls"] == ask(changed("consumer", side(2, layout, 64)))["pulls"]
