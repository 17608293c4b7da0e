"""`mooncake-hetero-tp plan`: the input and the answer of the interface, checked against an oracle of its own.

The oracle never reads strides: it fills logical arrays with the place of each element, transposes them into
physical order with numpy and applies the answered copies to their bytes.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from io import BytesIO, TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mooncake_hetero_tp.cli import main
from mooncake_hetero_tp.cli.answer import answer
from mooncake_hetero_tp.cli.case import read_case
from mooncake_hetero_tp.cli.memory import engine_memory, stage_layers
from mooncake_hetero_tp.core.cost import Rates
from mooncake_hetero_tp.core.layout import VLLM_LAYOUTS
from mooncake_hetero_tp.core.tables import validate_table

Json = dict[str, Any]


def side(tp: int = 1, layout: str = "LBHNC", block_size: int | list[int] = 16, **more: object) -> Json:
    return {"tp": tp, "pp": 1, "layout": layout, "block_size": block_size, "num_blocks": 64, **more}


def attention(name: str, kv_heads: int = 8, head_size: int = 128, **more: object) -> Json:
    return {"name": name, "kind": "attention", "kv_heads": kv_heads, "head_size": head_size, **more}


def layers(count: int, kv_heads: int = 8, head_size: int = 128) -> list[Json]:
    return [attention(f"model.layers.{place}.self_attn.attn", kv_heads, head_size) for place in range(count)]


def make_case(
    producer: Json, consumer: Json, of: list[Json], request: Json | None = None, dtype: str = "bfloat16"
) -> Json:
    found = {"producer": producer, "consumer": consumer, "dtype": dtype, "layers": of}
    return found if request is None else {**found, "request": request}


def example() -> Json:
    """The case of the interface's description."""
    return make_case(
        side(),
        side(2, "BLHNC", 64),
        layers(1),
        {"tokens": 70, "skip_tokens": 0, "producer_blocks": [[3, 9, 4, 7, 11]], "consumer_blocks": [[5, 2]]},
    )


def ask(case: object) -> Json:
    """The answer as a script gets it."""
    found: Json = json.loads(msgspec.json.encode(answer(case, Rates())))
    return found


def pull_of(found: Json, consumer_tp: int, producer_tp: int) -> Json:
    names = ({"pp": 0, "tp": consumer_tp}, {"pp": 0, "tp": producer_tp})
    return next(pull for pull in found["pulls"] if (pull["consumer_rank"], pull["producer_rank"]) == names)


def spots(pull: Json) -> list[tuple[int, int, int]]:
    return [(copy["src"], copy["dst"], copy["bytes"]) for copy in pull["copies"]]


# --- the oracle ------------------------------------------------------------------------------------------------------

EMPTY = -1


def per_group(value: int | list[int], group: int) -> int:
    return value[group] if isinstance(value, list) else value


class Memory:
    """All arrays of one rank as bytes, element = id of (layer, global head, token, value)."""

    def __init__(self, case: Json, which: str, stage: Sequence[int], rank: int) -> None:
        self.case, self.side = case, case[which]
        self.consumer = which == "consumer"
        alike: dict[tuple[int, ...], list[int]] = {}
        for place in stage:
            alike.setdefault(self.shape(case["layers"][place]), []).append(place)
        self.arrays = {tuple(places): self.fill(shape, places, rank) for shape, places in alike.items()}

    def shape(self, layer: Json) -> tuple[int, ...]:
        block = per_group(self.side["block_size"], layer.get("group", 0))
        kernel = per_group(self.side.get("kernel_block_size", block), layer.get("group", 0))
        heads = max(layer["kv_heads"] // self.side["tp"], 1)
        return (self.side["num_blocks"] * block // kernel, heads, kernel, 2 * layer["head_size"])

    def fill(self, shape: tuple[int, ...], places: Sequence[int], rank: int) -> bytearray:
        logical = np.full((len(places), *shape), EMPTY, np.int64)
        for index, place in enumerate(places):
            self.fill_layer(logical[index], place, rank)
        physical = logical.transpose(["LBHNC".index(dim) for dim in self.side["layout"]])
        if padded := self.side.get("page_size_padded"):
            pages = np.ascontiguousarray(physical).reshape(-1, shape[1] * shape[2] * shape[3])
            physical = np.full((len(pages), padded // 8), EMPTY, np.int64)
            physical[:, : pages.shape[1]] = pages
        return bytearray(np.ascontiguousarray(physical).tobytes())

    def fill_layer(self, pages: np.ndarray[Any, np.dtype[np.int64]], place: int, rank: int) -> None:
        layer, request = self.case["layers"][place], self.case["request"]
        group = layer.get("group", 0)
        block = per_group(self.side["block_size"], group)
        first = request["skip_tokens"] if self.consumer else 0
        blocks = request["consumer_blocks" if self.consumer else "producer_blocks"][group]
        skipped = first // block
        values = np.arange(pages.shape[3])
        for head in range(pages.shape[1]):
            unit = rank * layer["kv_heads"] // self.side["tp"] + head
            for token in range(first, request["tokens"]):
                page, offset = divmod(blocks[token // block - skipped] * block + token % block, pages.shape[2])
                pages[page, head, offset] = ((place * 64 + unit) * 4096 + token) * 4096 + values

    def array_of(self, place: int) -> bytearray:
        return next(array for places, array in self.arrays.items() if place in places)

    def emptied(self) -> Memory:
        for array in self.arrays.values():
            array[:] = np.full(len(array) // 8, EMPTY, np.int64).tobytes()
        return self


def stages(case: Json, which: str) -> list[range]:
    count, stages_ = len(case["layers"]), case[which]["pp"]
    sizes = [count // stages_ + (1 if 0 < stages_ - 1 - place <= count % stages_ else 0) for place in range(stages_)]
    ends = np.cumsum(sizes).tolist()
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def check(case: Json) -> Json:
    """Answers a float64 case and proves the answer on real bytes."""
    found = ask(case)
    assert found["status"] == "ok", found["why"]
    memories = {
        which: {
            (pp, tp): Memory(case, which, stage, tp)
            for pp, stage in enumerate(stages(case, which))
            for tp in range(case[which]["tp"])
        }
        for which in ("producer", "consumer")
    }
    names = [layer["name"] for layer in case["layers"]]
    for (pp, tp), wanted in memories["consumer"].items():
        written = Memory(case, "consumer", stages(case, "consumer")[pp], tp).emptied()
        own = [pull for pull in found["pulls"] if pull["consumer_rank"] == {"pp": pp, "tp": tp}]
        for pull in own:
            source = memories["producer"][pull["producer_rank"]["pp"], pull["producer_rank"]["tp"]]
            for copy in pull["copies"]:
                apply(copy, source.array_of(names.index(copy["layer"])), written.array_of(names.index(copy["layer"])))
            check_pull(pull, source, written, names)
        assert written.arrays == wanted.arrays
        check_written_once([copy for pull in own for copy in pull["copies"]], written, names)
    return found


def apply(copy: Json, source: bytearray, target: bytearray) -> None:
    assert copy["component"] == "kv"
    assert 0 <= copy["src"] <= copy["src"] + copy["bytes"] <= len(source)
    assert 0 <= copy["dst"] <= copy["dst"] + copy["bytes"] <= len(target)
    target[copy["dst"] : copy["dst"] + copy["bytes"]] = source[copy["src"] : copy["src"] + copy["bytes"]]


def check_pull(pull: Json, source: Memory, target: Memory, names: list[str]) -> None:
    copies = pull["copies"]
    assert pull["bytes"] == sum(copy["bytes"] for copy in copies) > 0
    assert [copy["dst"] for copy in copies] == sorted(copy["dst"] for copy in copies)
    for name in names:
        own = [copy for copy in copies if copy["layer"] == name]
        assert not any(continues(left, right) for left, right in pairwise(own)), "not maximally merged"
    assert pull["descriptors"] == len(list(merged(copies, source, target, names)))


def continues(left: Json, right: Json) -> bool:
    return bool(left["src"] + left["bytes"] == right["src"] and left["dst"] + left["bytes"] == right["dst"])


def merged(copies: list[Json], source: Memory, target: Memory, names: list[str]) -> Iterator[Json]:
    """Heads of the descriptors: copies that do not continue one of the same two arrays, whatever the layer."""
    ends: set[tuple[int, int, int, int]] = set()
    for copy in copies:
        place = names.index(copy["layer"])
        arrays = (id(source.array_of(place)), id(target.array_of(place)))
        if (*arrays, copy["src"], copy["dst"]) not in ends:
            yield copy
        ends.add((*arrays, copy["src"] + copy["bytes"], copy["dst"] + copy["bytes"]))


def check_written_once(copies: list[Json], target: Memory, names: list[str]) -> None:
    by_array: dict[int, list[tuple[int, int]]] = {}
    for copy in copies:
        spans = by_array.setdefault(id(target.array_of(names.index(copy["layer"]))), [])
        spans.append((copy["dst"], copy["dst"] + copy["bytes"]))
    for spans in by_array.values():
        assert all(left[1] <= right[0] for left, right in pairwise(sorted(spans)))


def random_side(draw: random.Random, heads: Sequence[int], groups: int) -> Json:
    fits = [tp for tp in (1, 2, 3, 4, 6, 8) if all(count % tp == 0 or tp % count == 0 for count in heads)]
    sizes = [draw.choice([4, 6, 8, 12, 16]) for _ in range(groups)]
    chosen = side(draw.choice(fits), draw.choice(VLLM_LAYOUTS), sizes if groups > 1 else sizes[0])
    chosen |= {"pp": draw.choice([1, 1, 2, 3]), "num_blocks": draw.randint(7, 9)}
    special = draw.random()
    if special < 0.2 and chosen["layout"] in {"LBHNC", "LBNHC", "BLHNC", "BLNHC"}:
        chosen["page_size_padded"] = 8 * max(sizes) * max(heads) * 2 * 3 + 8 * draw.randint(0, 5)
    elif special < 0.5 and chosen["layout"] in {"LBHNC", "LBNHC"}:
        chosen["kernel_block_size"] = [draw.choice([1, 2, size // 2, size]) for size in sizes]
        chosen["kernel_block_size"] = [
            k if s % k == 0 else 1 for k, s in zip(chosen["kernel_block_size"], sizes, strict=True)
        ]
    return chosen


def random_case(seed: int) -> Json:
    draw = random.Random(seed)
    groups = draw.choice([1, 1, 2])
    of: list[Json] = []
    for place in range(draw.randint(1, 5)):
        heads = draw.choice([1, 2, 4, 6, 8]) if place == 0 or draw.random() < 0.2 else of[-1]["kv_heads"]
        of.append(attention(f"layer.{place}", heads, draw.choice([1, 1, 2]), group=draw.randrange(groups)))
    heads = [layer["kv_heads"] for layer in of]
    sides = [random_side(draw, heads, groups) for _ in range(2)]
    limit = min(min(np.atleast_1d(one["block_size"])) * one["num_blocks"] for one in sides)
    tokens = draw.randint(1, min(int(limit), 40))
    skip = draw.randint(0, tokens - 1) if draw.random() < 0.5 else 0
    request: Json = {"tokens": tokens, "skip_tokens": skip}
    for name, one, first in (("producer_blocks", sides[0], 0), ("consumer_blocks", sides[1], skip)):
        request[name] = [
            draw.sample(range(one["num_blocks"]), -(-tokens // size) - first // size)
            for size in [per_group(one["block_size"], group) for group in range(groups)]
        ]
    return make_case(sides[0], sides[1], of, request, "float64")


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_copies_against_the_oracle(first: int) -> None:
    for seed in range(first, first + 50):
        case = random_case(seed)
        try:
            check(case)
        except AssertionError:
            print(f"seed {seed}: {json.dumps(case)}")
            raise


@pytest.mark.parametrize("producer", VLLM_LAYOUTS)
@pytest.mark.parametrize("consumer", VLLM_LAYOUTS)
def test_every_pair_of_layouts(producer: str, consumer: str) -> None:
    request = {"tokens": 21, "skip_tokens": 3, "producer_blocks": [[2, 0, 3]], "consumer_blocks": [[1, 3, 2, 4, 0, 6]]}
    of = layers(2, kv_heads=4, head_size=1)
    for tps in ((1, 2), (4, 2), (8, 1)):
        check(
            make_case(
                side(tps[0], producer, 8, num_blocks=4),
                side(tps[1], consumer, 4, num_blocks=7),
                of,
                request,
                "float64",
            )
        )


def test_the_oracle_sees_a_wrong_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: head 1 taken from a padded page (vllm#52516 review)."""
    case = random_case(7)
    assert check(case)["pulls"]
    real = ask(case)
    real["pulls"][0]["copies"][0]["src"] += 8
    monkeypatch.setattr(sys.modules[__name__], "ask", lambda _: real)
    with pytest.raises(AssertionError):
        check(case)


# --- exact vectors from public threads -------------------------------------------------------------------------------

HEAD_SLICE = 65536
"""One of four KV heads: 128 tokens x 2 x 128 values of 2 bytes; a full page is 262,144 bytes (vllm#52516)."""


def replicated(producer_tp: int, consumer_tp: int) -> Json:
    request = {"tokens": 128, "skip_tokens": 0, "producer_blocks": [[0]], "consumer_blocks": [[0]]}
    sides = [side(tp, block_size=128) for tp in (producer_tp, consumer_tp)]
    return make_case(sides[0], sides[1], layers(1, kv_heads=4), request)


def head_places(found: Json) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(consumer rank, global head) -> (producer rank, source offset)s of each head slice read."""
    places: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for pull in found["pulls"]:
        for src, dst, length in spots(pull):
            assert length % HEAD_SLICE == 0
            for step in range(0, length, HEAD_SLICE):
                key = (pull["consumer_rank"]["tp"], (dst + step) // HEAD_SLICE)
                places.setdefault(key, []).append((pull["producer_rank"]["tp"], src + step))
    return places


@pytest.mark.parametrize(
    "producer_tp,consumer_tp,sources",
    [
        (1, 8, {rank: [(0, rank // 2 * HEAD_SLICE)] for rank in range(8)}),
        (2, 8, {rank: [(rank // 4, rank // 2 % 2 * HEAD_SLICE)] for rank in range(8)}),
        (4, 8, {rank: [(rank // 2, 0)] for rank in range(8)}),
    ],
)
def test_replicated_heads_read_their_own_head(
    producer_tp: int, consumer_tp: int, sources: dict[int, list[tuple[int, int]]]
) -> None:
    found = head_places(ask(replicated(producer_tp, consumer_tp)))
    assert found == {(rank, 0): where for rank, where in sources.items()}


@pytest.mark.parametrize("consumer_tp", [1, 2])
def test_replicas_send_each_head_once(consumer_tp: int) -> None:
    """P TP8: ranks 2i and 2i+1 both hold head i; each slice of D comes from one of them, at its offset 0."""
    found = head_places(ask(replicated(8, consumer_tp)))
    local = 4 // consumer_tp
    assert set(found) == {(rank, head) for rank in range(consumer_tp) for head in range(local)}
    for (rank, head), where in found.items():
        assert [(producer // 2, src) for producer, src in where] == [(rank * local + head, 0)]


def test_head_ranges_come_from_the_models_total() -> None:
    """Two KV heads: TP1 -> TP4 ranks hold heads 0,0,1,1; TP4 -> TP1 reads two ranks, one of each head."""
    request = {"tokens": 16, "skip_tokens": 0, "producer_blocks": [[0]], "consumer_blocks": [[0]]}
    wide = ask(make_case(side(1), side(4), layers(1, kv_heads=2), request))
    assert [spots(pull_of(wide, rank, 0)) for rank in range(4)] == [
        [(0, 0, 8192)], [(0, 0, 8192)], [(8192, 0, 8192)], [(8192, 0, 8192)],
    ]  # fmt: skip
    narrow = ask(make_case(side(4), side(1), layers(1, kv_heads=2), request))
    assert [pull["producer_rank"]["tp"] // 2 for pull in narrow["pulls"]] == [0, 1]


@pytest.mark.parametrize("layout,length", [("LBHNC", 8), ("LBNHC", 2)])
def test_head_one_of_a_tiny_page(layout: str, length: int) -> None:
    """vllm#35444: head 1 is bytes 8-15 of a head-major page and 2,3,6,7,10,11,14,15 of a token-major one."""
    request = {"tokens": 4, "skip_tokens": 0, "producer_blocks": [[0]], "consumer_blocks": [[0]]}
    sides = [side(1, layout, 4), side(2, layout, 4)]
    pull = pull_of(ask(make_case(sides[0], sides[1], layers(1, 2, 1), request, "fp8")), 1, 0)
    read = [byte for src, _, count in spots(pull) for byte in range(src, src + count)]
    assert read == ([8, 9, 10, 11, 12, 13, 14, 15] if length == 8 else [2, 3, 6, 7, 10, 11, 14, 15])


def test_padding_does_not_move_heads() -> None:
    """vllm#52516 review: 16,384 bytes in 20,480; D rank 2 reads head 1 at 4096, rank 6 head 3 at 12288."""
    request = {"tokens": 16, "skip_tokens": 0, "producer_blocks": [[0]], "consumer_blocks": [[1]]}
    sides = [side(1, page_size_padded=20480), side(8, page_size_padded=5120)]
    found = ask(make_case(sides[0], sides[1], layers(1, 4, 64), request))
    assert spots(pull_of(found, 2, 0)) == [(4096, 5120, 4096)]
    assert spots(pull_of(found, 6, 0)) == [(12288, 5120, 4096)]


@pytest.mark.parametrize(
    "producer_size,consumer_size,tokens,skip,expected",
    [
        (16, 64, 70, 0, [(0, 0, 16), (16, 16, 16), (32, 32, 16), (48, 48, 16), (64, 64, 6)]),
        (64, 16, 70, 32, [(32, 32, 16), (48, 48, 16), (64, 64, 6)]),
        (12, 8, 40, 0, [(0, 0, 8), (8, 8, 4), (12, 12, 4), (16, 16, 8), (24, 24, 8), (32, 32, 4), (36, 36, 4)]),
    ],
)
def test_block_sizes_meet_in_token_runs(
    producer_size: int, consumer_size: int, tokens: int, skip: int, expected: list[tuple[int, int, int]]
) -> None:
    """vllm#26744, vllm#59592: pieces by token; every other block, so that none merge."""
    producer_blocks = [list(range(0, 2 * -(-tokens // producer_size), 2))]
    consumer_pages = range(skip // consumer_size, -(-tokens // consumer_size))
    request = {
        "tokens": tokens,
        "skip_tokens": skip,
        "producer_blocks": producer_blocks,
        "consumer_blocks": [[2 * page for page in consumer_pages]],
    }
    sides = [side(1, block_size=producer_size), side(1, block_size=consumer_size)]
    found = ask(make_case(sides[0], sides[1], layers(1, 1, 1), request, "fp8"))
    width = 2

    def place(token: int, size: int) -> int:
        return (token // size * 2 * size + token % size) * width

    assert spots(found["pulls"][0]) == [
        (place(src, producer_size), place(dst, consumer_size), count * width) for src, dst, count in expected
    ]


def test_a_logical_block_is_its_kernel_blocks() -> None:
    """vllm#54272: block 2 of 12 tokens is kernel pages 6, 7, 8 of 4; each copy is a third of the block."""
    request = {"tokens": 12, "skip_tokens": 0, "producer_blocks": [[2]], "consumer_blocks": [[2]]}
    sides = [side(1, block_size=12, kernel_block_size=4), side(2, block_size=12, kernel_block_size=4)]
    found = ask(make_case(sides[0], sides[1], layers(1, 2, 1), request, "fp8"))
    assert spots(pull_of(found, 1, 0)) == [(16 * page + 8, 8 * page, 8) for page in (6, 7, 8)]
    assert [page * 16 for page in (6, 7, 8)] == [src - 8 for src, _, _ in spots(pull_of(found, 1, 0))]


def field_case(layout: str, tokens: int) -> Json:
    """The hybrid model's attention: 12 layers, 2 KV heads of 256, blocks of 1,568 tokens."""
    pages = -(-tokens // 1568)
    blocks = [[7, 2, 5][:pages]]
    request = {"tokens": tokens, "skip_tokens": 0, "producer_blocks": blocks, "consumer_blocks": blocks}
    sides = [side(tp, layout, 1568, num_blocks=8) for tp in (1, 2)]
    return make_case(sides[0], sides[1], layers(12, 2, 256), request)


def test_the_field_case_cuts_cleanly_when_head_major() -> None:
    found = ask(field_case("BLHNC", 2 * 1568))
    assert [pull["descriptors"] for pull in found["pulls"]] == [24, 24]
    for pull in found["pulls"]:
        assert {copy["bytes"] for copy in pull["copies"]} == {1_605_632}
        assert pull["bytes"] == 24 * 1_605_632
    assert pull_of(found, 1, 0)["copies"][0]["src"] % (2 * 1_605_632) == 1_605_632
    assert [one["severity"] for one in found["mismatches"]] == ["note"]


def test_the_field_case_is_exact_when_token_major() -> None:
    found = ask(field_case("BLNHC", 1568 + 3))
    for pull in found["pulls"]:
        assert {copy["bytes"] for copy in pull["copies"]} == {1024}
        assert pull["descriptors"] == len(pull["copies"]) == 12 * 1571
    staging = [one for one in found["mismatches"] if one["severity"] == "staging"]
    assert [one["field"] for one in staging] == ["layout"]
    assert "1024 bytes" in staging[0]["effect"]
    assert "head-major" in staging[0]["remedy"]


def test_equal_engines_need_one_descriptor() -> None:
    """Sixteen neighbouring blocks of all layers: one run where a block holds all layers, one a layer otherwise."""
    request = {
        "tokens": 256,
        "skip_tokens": 0,
        "producer_blocks": [list(range(3, 19))],
        "consumer_blocks": [list(range(20, 36))],
    }
    packed = ask(make_case(side(layout="BLHNC"), side(layout="BLHNC"), layers(4), request))
    assert packed["pulls"][0]["descriptors"] == 1
    assert len(packed["pulls"][0]["copies"]) == 16 * 4
    apart = ask(make_case(side(), side(), layers(4), request))
    assert apart["pulls"][0]["descriptors"] == len(apart["pulls"][0]["copies"]) == 4


def test_order_of_groups_does_not_matter() -> None:
    """vllm#52592: the same layers in another order of groups are read in the same way."""
    answers = []
    for order in ((0, 1), (1, 0)):
        sizes = [[16, 32][group] for group in order]
        blocks = [[[4, 1, 9], [3, 6]][group] for group in order]
        request = {"tokens": 40, "skip_tokens": 0, "producer_blocks": blocks, "consumer_blocks": blocks}
        of = [attention(name, group=order[place]) for place, name in enumerate(("full", "window"))]
        found = ask(make_case(side(1, block_size=sizes), side(2, block_size=sizes), of, request))
        assert [group["index"]["consumer"] for group in found["agreement"]["groups"]] == list(order)
        answers.append(found["pulls"])
    assert answers[0] == answers[1]


def test_stages_share_layers_by_name() -> None:
    """vllm#56033: eight layers, P PP4, D PP2: each P stage is read by one D stage only."""
    request = {"tokens": 16, "skip_tokens": 0, "producer_blocks": [[0]], "consumer_blocks": [[0]]}
    found = ask(make_case(side() | {"pp": 4}, side() | {"pp": 2}, layers(8), request))
    pairs = [(pull["consumer_rank"]["pp"], pull["producer_rank"]["pp"]) for pull in found["pulls"]]
    assert pairs == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert {copy["layer"] for copy in found["pulls"][2]["copies"]} == {layer["name"] for layer in layers(8)[4:6]}


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


# --- shapes, groups, geometry ----------------------------------------------------------------------------------------


def test_layers_of_another_shape_have_an_array_of_their_own() -> None:
    of = [attention("a"), attention("wide", head_size=256), attention("b"), attention("few", kv_heads=4)]
    request = {"tokens": 16, "skip_tokens": 0, "producer_blocks": [[1]], "consumer_blocks": [[0]]}
    found = ask(make_case(side(), side(), of, request))
    arrays = found["geometry"]["producer"][0]["arrays"]
    assert [array["layers"] for array in arrays] == [["a", "b"], ["wide"], ["few"]]
    assert [array["shape"]["L"] for array in arrays] == [2, 1, 1]
    page = 8 * 16 * 512
    starts = {copy["layer"]: copy["src"] for copy in found["pulls"][0]["copies"]}
    assert starts == {"a": page, "b": 64 * page + page, "wide": 2 * page, "few": page // 2}


def test_memories_are_valid_tables() -> None:
    for seed in range(25):
        case = read_case(random_case(seed))
        for name in case.sides:
            for memory in engine_memory(case, name).values():
                validate_table(memory.table)


def test_without_a_request_counts_are_predicted() -> None:
    case = example()
    del case["request"]
    found = ask(case)
    assert found["status"] == "ok"
    assert found["pulls"] == []
    assert found["predicted"]["tokens"] == 64
    assert [(one["descriptors"], one["bytes"]) for one in found["predicted"]["pulls"]] == [(16, 4 * 64 * 512)] * 2
    assert found["agreement"]["layout"] == {"producer": "LBHNC", "consumer": "BLHNC"}
    assert found["geometry"]["consumer"][0]["arrays"][0]["strides"] == {
        "L": 131072, "B": 131072, "H": 32768, "N": 512, "C": 2,
    }  # fmt: skip
    assert ask({**case, "request": None}) == found


def test_a_prediction_needs_no_room() -> None:
    case = make_case(side(num_blocks=1), side(2, "BLNHC", 1024, num_blocks=1), layers(2))
    assert [one["bytes"] for one in ask(case)["predicted"]["pulls"]] == [2 * 4 * 512 * 1024] * 2


@pytest.mark.parametrize("tokens,skip", [(0, 0), (70, 70), (64, 64)])
def test_an_empty_range_pulls_nothing(tokens: int, skip: int) -> None:
    case = example()
    case["request"] = {"tokens": tokens, "skip_tokens": skip, "producer_blocks": [[]], "consumer_blocks": [[]]}
    found = ask(case)
    assert (found["status"], found["pulls"], found["mode"]) == ("ok", [], "direct")
    assert "predicted" not in found


# --- refused and invalid ---------------------------------------------------------------------------------------------


def changed(path: str, value: object) -> Json:
    """The example with one field replaced; a value of `...` removes it."""
    case: Any = example()
    *steps, last = path.split(".")
    where = case
    for step in steps:
        where = where[int(step)] if step.isdigit() else where[step]
    if value is ...:
        del where[last]
    else:
        where[int(last) if last.isdigit() else last] = value
    return dict(case)


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
        ("layers.0.kind", "gdn", ["layers[0].kind", "'gdn'", "attention"]),
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


# --- the command -----------------------------------------------------------------------------------------------------


def run(tmp_path: Path, case: object, *options: str) -> int:
    path = tmp_path / "case.json"
    path.write_text(case if isinstance(case, str) else json.dumps(case))
    return main(["plan", str(path), *options])


def test_the_example_answers_as_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, example(), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {"status", "agreement", "mismatches", "mode", "why", "pulls"} <= set(found)
    assert (found["status"], found["mode"]) == ("ok", "direct")
    assert [(pull["consumer_rank"], pull["producer_rank"]) for pull in found["pulls"]] == [
        ({"pp": 0, "tp": rank}, {"pp": 0, "tp": 0}) for rank in range(2)
    ]
    for pull in found["pulls"]:
        assert set(pull) == {"consumer_rank", "producer_rank", "descriptors", "bytes", "copies"}
        assert set(pull["copies"][0]) == {"layer", "component", "src", "dst", "bytes"}
        assert pull["bytes"] == 70 * 4 * 512
        assert pull["descriptors"] == len(pull["copies"]) == 4 * 5
    assert spots(found["pulls"][1])[0] == (11 * 65536 + 4 * 8192, 2 * 131072, 6 * 512)
    assert "25 us a descriptor, 1.6 GB/s" in found["why"]
    assert found["rates"] == {"descriptor_s": 25e-6, "bytes_per_s": 1.6e9}


def test_a_bad_case_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [example(), changed("consumer.tp", 3), 7, changed("dtype", "int4"), example()]
    assert run(tmp_path, cases, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["status"] for one in found] == ["ok", "refused", "invalid", "invalid", "ok"]
    assert found[0] == found[4] == ask(example())


@pytest.mark.parametrize(
    "cases,status",
    [
        (example(), 0),
        ([example()], 0),
        ([], 0),
        (changed("consumer.tp", 3), 2),
        ([changed("consumer.tp", 3), example()], 2),
        (changed("dtype", "int4"), 1),
        ([changed("consumer.tp", 3), changed("dtype", "int4")], 1),
        ([[example()]], 1),
        ("null", 1),
    ],
)
def test_exit_status_and_shape_of_the_answer(
    cases: object, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, cases, "--json") == status
    assert isinstance(json.loads(capsys.readouterr().out), list) == isinstance(cases, list)
    assert run(tmp_path, cases) == status


def test_tables_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [example(), changed("request", None), changed("consumer.tp", 3), changed("dtype", "int4")]
    assert run(tmp_path, cases) == 1
    out = capsys.readouterr().out
    for word in (
        "case 1 of 4: ok", "case 2 of 4: ok", "case 3 of 4: refused", "case 4 of 4: invalid", "BLHNC", "143360",
        "predicted for 64 tokens", "25 us a descriptor", "tensor_parallel_size", "int4",
    ):  # fmt: skip
        assert word in out


@pytest.mark.parametrize(
    "arguments",
    [[], ["plan"], ["plan", "--json"], ["plan", "a.json", "b.json"], ["plan", "a.json", "--nonsense"], ["nonsense"]],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert "Usage" in captured.err + captured.out


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path / "nowhere.json"), "--json"]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main(["plan", str(tmp_path), "--json"]) == 1
    assert "directory" in capsys.readouterr().err
    for text in ("", "{", "{'tp': 1}", "[1, 2", "[" * 100_000):
        assert run(tmp_path, text, "--json") == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "JSON" in captured.err
    (tmp_path / "case.json").write_bytes(b'"\xff\xfe"')
    assert main(["plan", str(tmp_path / "case.json")]) == 1


def test_rates_are_replaceable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = tmp_path / "rates.json"
    rates.write_text('{"descriptor_s": 1e-3, "bytes_per_s": 25e9}')
    assert run(tmp_path, example(), "--json", "--rates", str(rates)) == 0
    found = json.loads(capsys.readouterr().out)
    assert "20 ms at 1000 us a descriptor, 25 GB/s" in found["why"]
    assert found["rates"] == {"descriptor_s": 1e-3, "bytes_per_s": 25e9}
    for wrong in ('{"descriptor_s": 0}', '{"bandwidth": 1}', "[]", "x"):
        rates.write_text(wrong)
        assert run(tmp_path, example(), "--rates", str(rates)) == 1
        assert "descriptor_s and bytes_per_s" in capsys.readouterr().err


def test_a_case_from_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(json.dumps(example()).encode())))
    assert main(["plan", "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ask(example())


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out[0].isdigit()
    assert main(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    assert "one object for one case, a list of" in out
    assert "2 a case is refused" in out


BLOCKED = """
import sys

class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"vllm", "torch", "mooncake", "zmq", "ctypes"}:
            raise ImportError(f"{name} is not to be imported here")

sys.meta_path.insert(0, Wall())
for name in ("vllm", "torch", "mooncake"):
    assert name not in sys.modules
from mooncake_hetero_tp.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_it_works_without_vllm_torch_and_mooncake(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_text(json.dumps([example(), changed("consumer.tp", 3)]))
    for options in (["--json"], []):
        command = [sys.executable, "-c", BLOCKED, "plan", str(path), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 2, done.stderr
        assert done.stderr == ""
        if options:
            assert json.loads(done.stdout)[0] == ask(example())
