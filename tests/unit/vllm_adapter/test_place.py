"""place: a layer's module, or an error that names the layer."""

from __future__ import annotations

import pytest

from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.vllm_adapter.place import module_of
from mooncake_hetero_tp.vllm_adapter.probe import build_table
from tests.unit.vllm_adapter.doubles import Model


def test_a_layers_module_says_its_backend() -> None:
    model = Model(backend="TRITON_ATTN")
    engine = model.engine(model.cache_config())
    assert module_of(engine, model.names[1]).get_attn_backend().get_name() == "TRITON_ATTN"


def test_an_unknown_module_is_an_error() -> None:
    model = Model()
    config = model.cache_config()
    engine = model.engine(config)
    engine.vllm_config.compilation_config.static_forward_context.clear()
    with pytest.raises(ConfigError, match=f"{model.names[0]}: vLLM knows no attention module"):
        build_table(engine, model.allocate(config))
