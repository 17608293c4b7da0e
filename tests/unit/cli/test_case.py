"""cli/case.py: what makes no sense is invalid, with every reason."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from mooncake_hetero_tp.cli.answer import answer
from mooncake_hetero_tp.cli.costs import Terms
from tests.plan_cases import ask, changed, layers, random_case, side


@pytest.mark.parametrize(
    "path,value,words",
    [
        ("dtype", "int4", ["int4", "bfloat16"]),
        ("dtype", ..., ["dtype"]),
        ("producer.layout", "NHD", ["producer", "'NHD'", "LBHNC"]),
        ("producer.tp", 0, ["producer.tp", ">= 1"]),
        ("producer.tp", "1", ["producer.tp", "int"]),
        ("producer.tp", True, ["producer.tp", "int"]),
        ("producer.tp", 1.5, ["producer.tp", "int"]),
        ("producer.tp", ..., ["`tp`"]),
        ("consumer.pp", -1, ["consumer.pp"]),
        ("consumer.tp", 10**9, ["consumer.tp"]),
        ("consumer.num_blocks", 10**30, ["consumer.num_blocks"]),
        ("consumer", side(2, "BLHNC", 2**16, num_blocks=2**32), ["consumer", "longer than"]),
        ("consumer.block_size", 2**20, ["consumer", "8 heads x 1048576 tokens"]),
        ("consumer.block_size", [], ["consumer.block_size", "0 groups", "1"]),
        ("consumer.block_size", [64, 64], ["producer_blocks", "1 lists", "2 groups"]),
        ("consumer.kernel_block_size", 48, ["48", "64", "consumer"]),
        ("consumer.kernel_block_size", 128, ["128", "64", "consumer"]),
        ("consumer.page_size_padded", 131071, ["consumer", "131072", "131071"]),
        ("consumer.page_size", 131072, ["page_size"]),
        ("layers", [], ["layers"]),
        ("layers", {}, ["layers"]),
        ("layers.0", "attention", ["layers[0]"]),
        ("layers.0.kind", "rwkv", ["layers[0].kind", "'rwkv'", "attention", "gdn", "mamba2"]),
        ("layers.0.kind", "gdn", ["layers[0]", "kv_heads"]),
        ("consumer.page_size_padded", [131072, None], ["producer_blocks", "1 lists", "2 groups"]),
        ("layers.0.kind", ["attention"], ["layers[0].kind"]),
        ("layers.0.kind", ..., ["layers[0].kind", "attention"]),
        ("layers.0.name", "", ["layers[0]", "name"]),
        ("layers.0.kv_heads", 0, ["layers[0]", "kv_heads"]),
        ("layers.0.head_dim", 128, ["layers[0]", "head_dim"]),
        ("layers.0.group", 1, ["producer_blocks", "1 lists", "2 groups"]),
        ("layers", layers(1) * 2, ["model.layers.0.self_attn.attn", "twice"]),
        ("request.tokens", 400, ["producer_blocks[0]", "5 blocks", "25", "consumer_blocks[0]", "2 blocks", "7"]),
        ("request.tokens", -1, ["request.tokens"]),
        ("request.skip_tokens", 71, ["skip_tokens 71", "70"]),
        ("request.producer_blocks", [[3, 9, 4, 7]], ["producer_blocks[0]", "4 blocks", "5"]),
        ("request.producer_blocks", [[3, 9, 4, 7, 64]], ["producer_blocks[0]", "block 64", "64"]),
        ("request.producer_blocks", [[3, 9, 4, 7, -1]], ["producer_blocks"]),
        ("request.producer_blocks", [3, 9, 4, 7, 11], ["producer_blocks"]),
        ("request.consumer_blocks", [[5, 5]], ["consumer_blocks[0]", "block 5 twice"]),
        ("request.consumer_blocks", [[5, 2], []], ["consumer_blocks", "2 lists", "1 groups"]),
        ("request", [], ["request"]),
        ("requests", {}, ["requests"]),
    ],
)
def test_what_makes_no_sense_is_invalid_with_the_reason(path: str, value: object, words: list[str]) -> None:
    found = ask(changed(path, value))
    assert (found["status"], found["agreement"], found["mode"]) == ("invalid", None, None)
    assert found["pulls"] == found["mismatches"] == []
    for word in words:
        assert word in found["why"]


@pytest.mark.parametrize("case", [None, 3, "case", [], True])
def test_what_is_no_case_is_invalid(case: object) -> None:
    assert ask(case)["status"] == "invalid"


ODD_VALUES: tuple[Any, ...] = (
    None, 0, 1, 3, -1, 64, 2**31, 2**64, 1.5, True, "", "BLNHC", "LBCHN", [], [1], [[0]], {}, [16, 16], float("nan"),
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything inside a JSON value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(value[key], (*path, key))


def test_no_case_raises() -> None:
    """Fuzz: up to three values of a good case replaced by odd ones; every answer is one of the three."""
    seen = set()
    for seed in range(400):
        draw = random.Random(seed)
        case: Any = random_case(seed)
        for _ in range(draw.randint(1, 3)):
            *steps, last = draw.choice(list(places(case)))
            where = case
            for step in steps:
                where = where[step]
            where[last] = draw.choice(ODD_VALUES)
        found = answer(json.loads(json.dumps(case)), Terms())
        assert found.why
        seen.add(found.status)
    assert seen == {"ok", "refused", "invalid"}


STATE = {
    "name": "state", "kind": "gdn", "key_heads": 2, "value_heads": 4, "key_head_size": 8, "value_head_size": 8,
    "conv_kernel": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    "change,words",
    [
        ({"group": 0}, ["group 0", "with and without a token axis"]),
        ({"group": 1, "conv_kernel": 1}, ["conv_kernel", ">= 2"]),
        ({"group": 1, "state_dtype": "int4"}, ["int4", "bfloat16"]),
        ({"group": 1, "conv_layout": "XY"}, ["conv_layout", "XY"]),
        ({"group": 1, "value_heads": 1 << 20}, ["state of", "values"]),
    ],
)
def test_states_that_make_no_sense_are_invalid(change: dict[str, object], words: list[str]) -> None:
    found = ask(changed("layers.0", STATE | change) | {"layers": [*layers(1), STATE | change]} | {"request": None})
    assert found["status"] == "invalid"
    for word in words:
        assert word in found["why"]


def test_placeholders_before_a_state_may_repeat() -> None:
    """VLLM fills what a state's group no longer needs with one null block."""
    case = changed("layers", [STATE])
    case["request"] |= {"tokens": 160, "producer_blocks": [[0] * 9 + [7]], "consumer_blocks": [[0, 0, 3]]}
    assert ask(case)["status"] == "ok"
    case["layers"] = layers(1)
    assert "block 0 twice" in ask(case)["why"]
