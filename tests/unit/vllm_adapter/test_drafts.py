"""drafts: which layers are a draft model's, and whose totals their heads follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_hetero_tp.core.regions import Span
from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.vllm_adapter.drafts import is_draft
from mooncake_hetero_tp.vllm_adapter.probe import build_table
from tests.unit.vllm_adapter.doubles import Arch, Model


def test_per_layer_totals_are_used() -> None:
    model = Model(heads=4, tp_size=2)
    config = model.cache_config()
    engine = model.engine(config)
    arch = Arch(total_num_hidden_layers=2, total_num_kv_heads=64, head_size=8, per_layer_kv_heads=[4, 4])
    engine.vllm_config.model_config.model_arch_config = arch
    table = build_table(engine, model.allocate(config))
    assert {region.spans for region in table.regions} == {(Span(0, 0, 2),)}


def test_a_draft_layer_takes_the_draft_models_total() -> None:
    model = Model(heads=8, tp_size=4, layers=1)
    config = model.cache_config(model.spec(num_kv_heads=1))
    views = model.allocate(config)
    engine = model.engine(config)
    engine.vllm_config.model_config.model_arch_config.total_num_hidden_layers = 0  # layer 0 is past the model's
    with pytest.raises(ConfigError, match="no draft model is configured"):
        build_table(engine, views)
    draft = SimpleNamespace(model_arch_config=Arch(total_num_kv_heads=2))
    engine.vllm_config.speculative_config = SimpleNamespace(draft_model_config=draft)
    assert {region.spans for region in build_table(engine, views).regions} == {(Span(0, 0, 1),)}


def test_a_table_names_its_draft_layers() -> None:
    model = Model(layers=3)
    config = model.cache_config()
    engine = model.engine(config)
    assert build_table(engine, model.allocate(config)).draft_layers == ()
    engine.vllm_config.model_config.model_arch_config.total_num_hidden_layers = 2
    assert build_table(engine, model.allocate(config)).draft_layers == (model.names[2],)


@pytest.mark.parametrize(
    "name,spec,module,expected",
    [
        ("model.layers.1.self_attn.attn", {}, {}, False),
        ("model.layers.2.self_attn.attn", {}, {}, True),
        ("model.layers.1.self_attn.attn", {"is_draft": True}, {}, True),
        ("model.layers.1.self_attn.attn", {}, {"is_draft_layer": True}, True),
        ("draft_model.model.layers.0.self_attn.attn", {}, {}, True),
        ("encoder.attn", {}, {}, False),
    ],
)
def test_marks_and_names_of_draft_layers(name: str, spec: Any, module: Any, expected: bool) -> None:
    """By vLLM's marks; runners that mark nothing number drafts on, or begin their names with `draft_model.`."""
    model = Model(layers=2)
    engine = model.engine(model.cache_config())
    engine.vllm_config.compilation_config.static_forward_context[name] = SimpleNamespace(**module)
    assert is_draft(engine, name, SimpleNamespace(**spec)) is expected
