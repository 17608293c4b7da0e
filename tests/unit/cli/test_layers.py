"""cli/layers.py: what a page of each kind holds, counted from the model."""

from __future__ import annotations

import msgspec
import pytest

from mooncake_hetero_tp.cli.layers import LAYER_KINDS, Layer, StateLayer, is_dense, is_state, state_sizes
from mooncake_hetero_tp.core.state_tensors import ConvLayout

FIELDS: dict[str, dict[str, object]] = {
    "attention": {"kv_heads": 4, "head_size": 16},
    "sliding_window": {"kv_heads": 4, "head_size": 16, "window": 8},
    "mla": {"bytes_per_token": 10},
    "replicated": {"bytes_per_token": 10},
    "gdn": {"key_heads": 2, "value_heads": 4, "key_head_size": 3, "value_head_size": 5, "conv_kernel": 4},
    "mamba2": {"heads": 4, "groups": 2, "head_size": 3, "state_size": 5, "conv_kernel": 4},
}


def layer(kind: str, **more: object) -> Layer:
    return msgspec.convert({"name": "x", "kind": kind, **FIELDS[kind], **more}, LAYER_KINDS[kind])


def test_every_kind_is_covered_here() -> None:
    assert set(FIELDS) == set(LAYER_KINDS)


@pytest.mark.parametrize("kind", FIELDS)
def test_a_kind_takes_its_own_fields_only(kind: str) -> None:
    assert layer(kind).kind == kind
    assert is_dense(layer(kind)) == (kind == "attention")
    assert is_state(layer(kind)) == (kind in {"gdn", "mamba2"})
    for field in FIELDS[kind]:
        with pytest.raises(msgspec.ValidationError, match=field):
            layer(kind, **{field: 0})
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        layer(kind, colour=1)


@pytest.mark.parametrize(
    "kind,values,size",
    [
        ("gdn", (2 * 2 * 3 + 4 * 5) * 3 + 4 * 5 * 3, (2 * 2 * 3 + 4 * 5) * 3 * 2 + 4 * 5 * 3 * 4),
        ("mamba2", (4 * 3 + 2 * 2 * 5) * 3 + 4 * 3 * 5, (4 * 3 + 2 * 2 * 5) * 3 * 2 + 4 * 3 * 5 * 4),
    ],
)
def test_sizes_of_states(kind: str, values: int, size: int) -> None:
    found = layer(kind, state_dtype="float32")
    assert isinstance(found, StateLayer)
    assert state_sizes(found, "bfloat16") == (values, size)
    conv, heads = found.tensors(None, "bfloat16")
    assert (conv.order, conv.dtype, heads.dtype) == ("UCR", "bfloat16", "float32")
    assert found.tensors(ConvLayout.SD, "bfloat16")[0].order == "RUC"


def test_bytes_of_a_token() -> None:
    found = [layer(kind) for kind in ("attention", "sliding_window", "mla")]
    assert [one.token_bytes("float16") for one in found if not isinstance(one, StateLayer)] == [256, 256, 10]
