"""All kinds of layers through `mooncake-hetero-tp plan`, against an oracle of their own.

The oracle lays each component of a block out with numpy's axes, never with strides, moves the answered bytes and
counts how often each byte of the consumer is written.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from tests.plan_cases import Json, ask, attention, make_case, side

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

GDN: Json = {
    "kind": "gdn", "key_heads": 4, "value_heads": 8, "key_head_size": 3, "value_head_size": 2, "conv_kernel": 4,
    "conv_dtype": "float16", "state_dtype": "float32",
}  # fmt: skip
MAMBA2: Json = {
    "kind": "mamba2", "heads": 8, "groups": 2, "head_size": 3, "state_size": 5, "conv_kernel": 3,
    "state_dtype": "float32",
}  # fmt: skip
TOKENS, SKIP, WINDOW = 37, 9, 11


def columns(layer: Json) -> list[tuple[str, int, int]]:
    """(component, units, channels) of the convolution."""
    if layer["kind"] == "gdn":
        keys = [(name, layer["key_heads"], layer["key_head_size"]) for name in ("conv.q", "conv.k")]
        return [*keys, ("conv.v", layer["value_heads"], layer["value_head_size"])]
    shared = [(name, layer["groups"], layer["state_size"]) for name in ("conv.B", "conv.C")]
    return [("conv.x", layer["heads"], layer["head_size"]), *shared]


def held(units: int, tp: int, rank: int) -> list[int]:
    return [rank * units // tp + place for place in range(max(units // tp, 1))]


def components(layer: Json, one: Json, rank: int) -> dict[str, tuple[list[int], Ints]]:
    """Component -> global units here, and the offset in a block of each byte, `[unit, token or row, byte]`."""
    tp, block = one["tp"], one["block_size"][layer["group"]]
    if layer["kind"] in {"mla", "replicated"}:
        name = "latent" if layer["kind"] == "mla" else "replicated"
        return {name: ([0], np.arange(block * layer["bytes_per_token"]).reshape(1, block, -1))}
    if layer["kind"] == "sliding_window":
        units, width = held(layer["kv_heads"], tp, rank), 2 * layer["head_size"] * 2
        if one["layout"].endswith("HNC"):
            return {"kv": (units, np.arange(len(units) * block * width).reshape(len(units), block, width))}
        return {"kv": (units, np.arange(len(units) * block * width).reshape(block, len(units), width).swapaxes(0, 1))}
    rows = layer["conv_kernel"] - 1
    found = {}
    width = sum(len(held(units, tp, rank)) * channels for _, units, channels in columns(layer))
    for name, count, channels in columns(layer):
        mine = held(count, tp, rank)
        if one["conv_layout"] == "DS":
            offsets = np.arange(len(mine) * channels * rows * 2).reshape(len(mine), channels, rows, 2).swapaxes(1, 2)
        else:
            whole = np.arange(rows * width * 2).reshape(rows, width, 2)[:, : len(mine) * channels]
            offsets = whole.reshape(rows, len(mine), channels, 2).swapaxes(0, 1)
        found[name] = (mine, offsets.reshape(len(mine), rows, channels * 2))
    heads = held(layer["value_heads"] if layer["kind"] == "gdn" else layer["heads"], tp, rank)
    inner = (
        (layer["value_head_size"], layer["key_head_size"])
        if layer["kind"] == "gdn"
        else (layer["head_size"], layer["state_size"])
    )
    found["ssm"] = (heads, np.arange(len(heads) * inner[0] * inner[1] * 4).reshape(len(heads), inner[0], -1))
    return found


@functools.cache
def value(key: tuple[str, str], unit: int, label: int, count: int) -> Bytes:
    seed = [*"/".join(key).encode(), unit, label]
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def blocks_of(case: Json, which: str, layer: Json) -> dict[int, tuple[int, int]]:
    """Label (token, or row of a state) -> (block, place in it) of all that is read."""
    one, group = case[which], layer["group"]
    size, lists = one["block_size"][group], case["request"][f"{which}_blocks"][group]
    skipped = SKIP // size if which == "consumer" else 0
    if layer["kind"] in {"gdn", "mamba2"}:
        slot = lists[(TOKENS - 1) // size - skipped]
        return {row: (slot, row) for row in range(64)}
    first = max(TOKENS - WINDOW + 1, SKIP) if layer["kind"] == "sliding_window" else SKIP
    return {token: (lists[token // size - skipped], token % size) for token in range(first, TOKENS)}


def elements(case: Json, which: str, layer: Json, rank: int) -> dict[tuple[str, int], list[tuple[Ints, Bytes]]]:
    """(component, block) -> offsets and what must be there."""
    found: dict[tuple[str, int], list[tuple[Ints, Bytes]]] = defaultdict(list)
    for name, (units, offsets) in components(layer, case[which], rank).items():
        for label, (block, place) in blocks_of(case, which, layer).items():
            for local, unit in enumerate(units if place < offsets.shape[1] else ()):
                row = offsets[local, place]
                found[name, block].append((row, value((layer["name"], name), unit, label, row.size)))
    return found


def check(case: Json) -> None:
    found = ask(case)
    assert found["status"] == "ok", found["why"]
    layers = {layer["name"]: layer for layer in case["layers"]}
    for rank in range(case["consumer"]["tp"]):
        pulls = [pull for pull in found["pulls"] if pull["consumer_rank"]["tp"] == rank]
        for name, layer in layers.items():
            memory: dict[tuple[str, int], Bytes] = {}
            written: dict[tuple[str, int], Ints] = {}
            for pull in pulls:
                source = {
                    key: spread(parts)
                    for key, parts in elements(case, "producer", layer, pull["producer_rank"]["tp"]).items()
                }
                for copy in (copy for copy in pull["copies"] if copy["layer"] == name):
                    key = (copy["component"], copy["dst_block"])
                    into = memory.setdefault(key, np.zeros(1 << 14, np.uint8))
                    span = slice(copy["dst"], copy["dst"] + copy["bytes"])
                    taken = source[copy["component"], copy["src_block"]][copy["src"] : copy["src"] + copy["bytes"]]
                    into[span] = taken
                    written.setdefault(key, np.zeros(1 << 14, np.int64))[span] += 1
            wanted = elements(case, "consumer", layer, rank)
            assert set(wanted) == set(memory)
            for key, parts in wanted.items():
                times = np.zeros(1 << 14, np.int64)
                for offsets, expected in parts:
                    times[offsets] += 1
                    assert np.array_equal(memory[key][offsets], expected), (rank, name, key)
                assert np.array_equal(times, written[key])


def spread(parts: list[tuple[Ints, Bytes]]) -> Bytes:
    memory = np.full(1 << 14, 0xA5, np.uint8)
    for offsets, content in parts:
        memory[offsets] = content
    return memory


def kinds_case(producer: tuple[int, str, str], consumer: tuple[int, str, str]) -> Json:
    """One layer of each kind; groups: latents and indexers, window, states. Blocks are unlike on the two sides."""
    of = [
        {"name": "latent", "kind": "mla", "bytes_per_token": 6, "group": 0},
        {"name": "index", "kind": "replicated", "bytes_per_token": 3, "group": 0},
        {**attention("window", 4, 2), "kind": "sliding_window", "window": WINDOW, "group": 1},
        {"name": "delta", "group": 2, **GDN},
        {"name": "mamba", "group": 2, **MAMBA2},
    ]
    sides = [
        side(tp, layout, sizes, conv_layout=conv)
        for (tp, layout, conv), sizes in ((producer, [4, 16, 64]), (consumer, [8, 4, 16]))
    ]
    lists: list[list[list[int]]] = []
    for one, skip in zip(sides, (0, SKIP), strict=True):
        counts = [-(-TOKENS // size) - skip // size for size in one["block_size"]]
        lists.append([[(7 * place + group) % 61 for place in range(count)] for group, count in enumerate(counts)])
    lists[1][2] = [0] * (len(lists[1][2]) - 1) + [5]  # place-holders before the state's slot
    request = {"tokens": TOKENS, "skip_tokens": SKIP, "producer_blocks": lists[0], "consumer_blocks": lists[1]}
    return make_case(sides[0], sides[1], of, request, "float16")


@pytest.mark.parametrize("tps", [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (8, 1), (1, 8)], ids=str)
@pytest.mark.parametrize("convs", [("DS", "DS"), ("SD", "DS"), ("DS", "SD"), ("SD", "SD")], ids=str)
def test_every_kind_is_planned_exactly(tps: tuple[int, int], convs: tuple[str, str]) -> None:
    layouts = ("LBHNC", "BLNHC") if tps[0] < tps[1] else ("LBNHC", "BLHNC")
    check(kinds_case((tps[0], layouts[0], convs[0]), (tps[1], layouts[1], convs[1])))


def test_padding_moves_nothing() -> None:
    """Offsets count from the component's place in its block, so padded pages answer the same."""
    plain = kinds_case((1, "LBHNC", "DS"), (2, "LBHNC", "DS"))
    padded = kinds_case((1, "LBHNC", "DS"), (2, "LBHNC", "DS"))
    padded["consumer"]["page_size_padded"] = [None, None, 4096]
    padded["consumer"]["kernel_block_size"] = [4, 4, 16]
    check(padded)
    padded["consumer"]["kernel_block_size"] = [8, 4, 16]
    answers = [[pull["copies"] for pull in ask(case)["pulls"]] for case in (plain, padded)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("field", ["src", "dst", "bytes", "src_block"])
def test_the_oracle_sees_a_wrong_copy(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = kinds_case((1, "LBHNC", "DS"), (2, "LBHNC", "DS"))
    check(case)
    real = ask(case)
    real["pulls"][0]["copies"][0][field] += 1
    monkeypatch.setattr(sys.modules[__name__], "ask", lambda _: real)
    with pytest.raises((AssertionError, KeyError)):
        check(case)
