"""cli/copies.py: runs that cross blocks are told block by block, on either side."""

from __future__ import annotations

from typing import Any

from tests.plan_cases import Json, ask, make_case, side


def latent_case(sizes: tuple[int, int], blocks: tuple[list[int], list[int]], layout: str = "LBHNC") -> Json:
    of = [{"name": "latent", "kind": "mla", "bytes_per_token": 2}]
    request = {"tokens": 8, "producer_blocks": [blocks[0]], "consumer_blocks": [blocks[1]]}
    return make_case(side(1, layout, sizes[0]), side(1, layout, sizes[1]), of, request)


def told(found: Json) -> list[tuple[Any, ...]]:
    fields = ("src_block", "src", "dst_block", "dst", "bytes")
    return [tuple(copy[field] for field in fields) for pull in found["pulls"] for copy in pull["copies"]]


def test_neighbouring_blocks_are_one_descriptor_and_a_copy_each() -> None:
    found = ask(latent_case((4, 4), ([2, 3], [5, 6])))
    assert found["pulls"][0]["descriptors"] == 1
    assert told(found) == [(2, 0, 5, 0, 8), (3, 0, 6, 0, 8)]


def test_blocks_of_unlike_size() -> None:
    assert told(ask(latent_case((8, 4), ([7], [1, 0])))) == [(7, 8, 0, 0, 8), (7, 0, 1, 0, 8)]
    assert told(ask(latent_case((4, 8), ([1, 0], [7])))) == [(1, 0, 7, 0, 8), (0, 0, 7, 8, 8)]


def test_dense_attention_names_no_block() -> None:
    case = latent_case((4, 4), ([2, 3], [5, 6]))
    case["layers"] = [{"name": "x", "kind": "attention", "kv_heads": 1, "head_size": 1}]
    (copy,) = ask(case)["pulls"][0]["copies"]
    assert set(copy) == {"layer", "component", "src", "dst", "bytes"}


def test_heads_outside_of_blocks_count_from_the_block_of_the_first() -> None:
    """LHBNC: a head's blocks lie together, the next head's after all of them."""
    case = latent_case((4, 4), ([2, 3], [5, 6]), "LHBNC")
    case["layers"] = [{"name": "x", "kind": "sliding_window", "kv_heads": 2, "head_size": 1, "window": 99}]
    block, head = 4 * 4, 64 * 4 * 4
    assert told(ask(case)) == [
        (2, 0, 5, 0, block), (2, head, 5, head, block), (3, 0, 6, 0, block), (3, head, 6, head, block),
    ]  # fmt: skip
