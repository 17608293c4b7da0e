"""encodings: what is known is described exactly, everything else is opaque and never guessed."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from mooncake_hetero_tp.core.regions import Axis
from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.types import Encoding
from mooncake_hetero_tp.vllm_adapter.components import Component, LayerFacts, PageView
from mooncake_hetero_tp.vllm_adapter.encodings import CPU_ATTN, LATENT, PACKED, PLANES, SLOTS, encode

HEADS, TOKENS, WIDTH, ITEM = 2, 4, 3, 2
DENSE = PageView(heads=HEADS, tokens=TOKENS, content_bytes=12, head_stride=48, token_stride=12)
FACTS = LayerFacts(
    layer="model.layers.0.attn",
    backend="FLASH_ATTN",
    isa=None,
    latent=False,
    kv_heads=HEADS,
    head_size=WIDTH,
    head_size_v=WIDTH,
    item_bytes=ITEM,
    dtype="bfloat16",
    own_slots=False,
    own_content=False,
    quantisation="NONE",
)


def offsets(component: Component) -> dict[tuple[int, ...], int]:
    """Byte offset of every element (unit, token, channel)."""
    axes = (component.unit, component.token, component.channel)
    return {
        index: component.offset + sum(step * axis.stride for step, axis in zip(index, axes, strict=True))
        for index in product(*(range(axis.count) for axis in axes))
    }


def covered(components: tuple[Component, ...]) -> list[int]:
    """Every byte the components touch, sorted, duplicates kept."""
    return sorted(
        start + byte for part in components for start in offsets(part).values() for byte in range(part.item_bytes)
    )


@pytest.mark.parametrize("backend", sorted(PACKED))
def test_packed_splits_content_into_k_then_v(backend: str) -> None:
    name, (k, v) = encode(replace(FACTS, backend=backend), DENSE)
    assert name == "packed"
    assert (k.name, v.name) == ("k", "v")
    assert offsets(k)[1, 2, 1] == 48 + 2 * 12 + 1 * ITEM
    assert offsets(v)[1, 2, 1] == 48 + 2 * 12 + (WIDTH + 1) * ITEM
    assert covered((k, v)) == list(range(96))


def test_packed_follows_token_major_and_padded_strides() -> None:
    """Page strides come from the view alone; vllm#52516 took them from the padded page."""
    name, (k, _) = encode(FACTS, replace(DENSE, head_stride=12, token_stride=24))
    assert name == "packed"
    assert (k.unit.stride, k.token.stride) == (12, 24)


def test_packed_takes_unlike_widths_of_k_and_v() -> None:
    name, (k, v) = encode(replace(FACTS, head_size_v=1), replace(DENSE, content_bytes=8))
    assert name == "packed"
    assert (k.channel, v.channel, v.offset) == (Axis(3, ITEM), Axis(1, ITEM), 6)


@pytest.mark.parametrize("isa", ["vec", "vec16"])
def test_cpu_attention_keeps_a_transposed_k_half_and_a_v_half(isa: str) -> None:
    name, (k, v) = encode(replace(FACTS, backend="CPU_ATTN", isa=isa), DENSE)
    assert name == "halves.transposed_k"
    assert offsets(k)[1, 2, 1] == 48 + (1 * TOKENS + 2) * ITEM
    assert offsets(v)[1, 2, 1] == 48 + (TOKENS * WIDTH + 2 * WIDTH + 1) * ITEM
    assert covered((k, v)) == list(range(96))


@pytest.mark.parametrize("isa", ["amx", "neon", "rvv", "vxe", "vsx", None])
def test_cpu_attention_with_another_isa_is_opaque(isa: str | None) -> None:
    name, parts = encode(replace(FACTS, backend="CPU_ATTN", isa=isa), DENSE)
    assert name == ("opaque:CPU_ATTN" if isa is None else f"opaque:CPU_ATTN.{isa}")
    assert covered(parts) == list(range(96))


def test_cpu_halves_need_equal_widths_and_dense_rows() -> None:
    cpu = replace(FACTS, backend="CPU_ATTN", isa="vec")
    name, _ = encode(replace(cpu, head_size_v=1), replace(DENSE, content_bytes=8))
    assert name.startswith("opaque:")
    name, _ = encode(cpu, replace(DENSE, token_stride=24, head_stride=12))
    assert name.startswith("opaque:")


@pytest.mark.parametrize("backend", sorted(LATENT))
def test_latent_rows_are_one_unit(backend: str) -> None:
    facts = replace(FACTS, backend=backend, latent=True, kv_heads=1, head_size=6, head_size_v=0)
    name, (row,) = encode(facts, replace(DENSE, heads=1))
    assert name == "latent"
    assert (row.name, row.unit.count, row.token, row.channel) == ("latent", 1, Axis(4, 12), Axis(6, ITEM))


@pytest.mark.parametrize(
    "changes",
    [{"backend": "SOMETHING_NEW"}, {"own_content": True}, {"quantisation": "OCTAVE_K3V4"}, {"backend": "FLASHMLA"}],
    ids=str,
)
def test_everything_else_is_opaque_with_heads_outermost(changes: dict[str, object]) -> None:
    name, parts = encode(replace(FACTS, **changes), DENSE)  # type: ignore[arg-type]
    assert name == f"opaque:{changes.get('backend', 'FLASH_ATTN')}"
    assert [part.name for part in parts] == ["kv"]
    assert parts[0].unit == Axis(HEADS, 48)
    assert covered(parts) == list(range(96))


def test_a_slot_is_never_taken_for_a_head() -> None:
    """Two slots (K and V) with two KV heads look like one slot a head; ROCM_ATTN packs K 16 bytes deep in its own."""
    name, parts = encode(replace(FACTS, backend="ROCM_ATTN", own_slots=True, own_content=True), DENSE)
    assert name == "opaque:ROCM_ATTN"
    assert [part.name for part in parts] == ["slot0", "slot1"]
    for part in parts:
        assert part.unit.stride < part.token.stride, "a planner must see that heads are not outermost"
    assert covered(parts) == list(range(96))


def test_two_slots_that_are_read_by_stride_are_known() -> None:
    """B12X: slot 0 is K, slot 1 is V, heads side by side in each token."""
    facts = replace(FACTS, backend="B12X", own_slots=True, own_content=True)
    name, (k, v) = encode(facts, DENSE)
    assert name == "slots"
    assert (k.name, v.name) == ("k", "v")
    assert offsets(k)[1, 2, 1] == 2 * 12 + WIDTH * ITEM + ITEM
    assert offsets(v)[0, 0, 0] == 48
    assert covered((k, v)) == list(range(96))
    assert encode(replace(facts, quantisation="INT8_PER_TOKEN_HEAD"), DENSE)[0] == "opaque:B12X"
    assert encode(replace(facts, kv_heads=1), DENSE)[0] == "opaque:B12X"


def test_content_that_no_unit_axis_tiles_is_refused_by_name() -> None:
    facts = replace(FACTS, backend="FLASHINFER", own_slots=True, kv_heads=5)
    with pytest.raises(ConfigError, match=r"model.layers.0.attn: backend FLASHINFER keeps 2 slots"):
        encode(facts, DENSE)


def test_odd_content_is_counted_in_bytes() -> None:
    """Inline scales make C no multiple of the item size."""
    _, (part,) = encode(replace(FACTS, own_content=True), replace(DENSE, content_bytes=13))
    assert (part.channel, part.item_bytes) == (Axis(13, 1), 1)


OURS = replace(FACTS, backend="OURS")


@pytest.mark.parametrize(
    "encoding,like", [(Encoding.PACKED, FACTS), (Encoding.HALVES, replace(FACTS, backend="CPU_ATTN", isa="vec"))]
)
def test_a_declared_backend_is_laid_out_as_a_known_one(encoding: Encoding, like: LayerFacts) -> None:
    assert encode(OURS, DENSE, {"OURS": encoding}) == encode(like, DENSE)
    assert encode(OURS, DENSE, {"OTHERS": encoding})[0] == "opaque:OURS"


def test_declared_latents_are_one_unit() -> None:
    latent = replace(FACTS, latent=True, kv_heads=1, head_size=6, head_size_v=0)
    view = replace(DENSE, heads=1)
    known = encode(replace(latent, backend="FLASHMLA"), view)
    assert encode(replace(latent, backend="OURS"), view, {"OURS": Encoding.LATENT}) == known


@pytest.mark.parametrize(
    "facts,view,encoding,words",
    [
        (FACTS, DENSE, Encoding.HALVES, "knows its pages as 'packed'"),
        (
            replace(FACTS, backend="CPU_ATTN", isa="amx"),
            DENSE,
            Encoding.PACKED,
            "knows its pages as 'opaque:CPU_ATTN.amx'",
        ),
        (replace(FACTS, backend="B12X", own_slots=True), DENSE, Encoding.PACKED, "knows its pages as 'slots'"),
        (OURS, DENSE, Encoding.LATENT, "holds K and V of each head"),
        (replace(OURS, latent=True), DENSE, Encoding.PACKED, "holds one latent row a token"),
        (
            OURS,
            replace(DENSE, content_bytes=16),
            Encoding.PACKED,
            "2 heads of 12 unscaled bytes .* 2 slots of 16 bytes",
        ),
        (replace(OURS, own_slots=True), DENSE, Encoding.PACKED, "expected 2 heads"),
        (OURS, replace(DENSE, token_stride=24, head_stride=12), Encoding.HALVES, "a head's tokens together"),
    ],
)
def test_a_declaration_that_cannot_be_true_is_refused(
    facts: LayerFacts, view: PageView, encoding: Encoding, words: str
) -> None:
    declared = {facts.backend: encoding}
    with pytest.raises(ConfigError, match=rf"layers.0.attn: backend_encodings declares {facts.backend} .*{words}"):
        encode(facts, view, declared)


def test_declaring_what_is_known_anyway_changes_nothing() -> None:
    assert encode(FACTS, DENSE, {"FLASH_ATTN": Encoding.PACKED}) == encode(FACTS, DENSE)


def test_the_page_for_users_names_every_known_backend_and_encoding() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cache_kinds.md").read_text()
    named = set(re.findall(r"`([\w.]+)`", page))
    assert PACKED | LATENT | PLANES | {CPU_ATTN, SLOTS, "packed.scales", *Encoding} <= named
