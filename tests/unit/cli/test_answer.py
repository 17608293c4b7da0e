"""cli/answer.py: the exact copies of cases from public threads, counts and predictions."""

from __future__ import annotations

import pytest

from mooncake_hetero_tp.core.cost import Mode
from tests.plan_cases import Json, ask, attention, example, layers, make_case, pull_of, side, spots

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
    found, direct = (ask(field_case("BLNHC", 1568 + 3), mode) for mode in (Mode.AUTO, Mode.DIRECT))
    for pull in direct["pulls"]:
        assert {copy["bytes"] for copy in pull["copies"]} == {1024}
        assert pull["descriptors"] == len(pull["copies"]) == 12 * 1571
    assert (found["mode"], direct["mode"]) == ("staged", "direct")
    assert found["pulls"] == [pull | {"descriptors": 3} for pull in direct["pulls"]]  # 19 MB in slots of 8 MiB
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
