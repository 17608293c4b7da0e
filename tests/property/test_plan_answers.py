"""Random pulls through `mooncake-hetero-tp plan`, against an oracle of their own.

The oracle never reads strides: it fills logical arrays with the place of each element, transposes them into
physical order with numpy and applies the answered copies to their bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from mooncake_hetero_tp.core.cost import Mode
from mooncake_hetero_tp.core.layout import VLLM_LAYOUTS
from tests.plan_cases import Json, ask, layers, make_case, per_group, random_case, side

EMPTY = -1


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
    """Answers a float64 case and proves the answer on real bytes; staged, the copies are the same."""
    found = ask(case, Mode.DIRECT)
    check_staged(found, ask(case, Mode.STAGED))
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


def check_staged(direct: Json, staged: Json) -> None:
    """These pulls all fit one slot."""
    assert staged["mode"] == ("staged" if direct["pulls"] else "direct")
    assert [pull | {"descriptors": 1} for pull in direct["pulls"]] == staged["pulls"]


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
    real = {mode: ask(case, mode) for mode in (Mode.DIRECT, Mode.STAGED)}
    for found in real.values():
        found["pulls"][0]["copies"][0]["src"] += 8
    monkeypatch.setattr(sys.modules[__name__], "ask", lambda _, mode: real[mode])
    with pytest.raises(AssertionError):
        check(case)
