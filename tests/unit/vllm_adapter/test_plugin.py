"""plugin: idempotent registration that never takes vLLM down."""

from __future__ import annotations

import logging

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from mooncake_hetero_tp.vllm_adapter import layout_fallback, plugin


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The factory's registry without our connector."""
    names = {name: loader for name, loader in KVConnectorFactory._registry.items() if name != plugin.CONNECTOR_NAME}
    monkeypatch.setattr(KVConnectorFactory, "_registry", names)
    monkeypatch.setattr(layout_fallback, "install", lambda: layout_fallback.Installation.PRESENT)
    return names


def test_the_connector_is_registered_once(registry: dict[str, object]) -> None:
    assert plugin.register_connector()
    loader = registry[plugin.CONNECTOR_NAME]
    assert not plugin.register_connector()
    plugin.register()
    assert registry[plugin.CONNECTOR_NAME] is loader


def test_register_never_raises_and_says_what_failed(
    registry: dict[str, object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> bool:
        raise RuntimeError("no factory in this vLLM")

    monkeypatch.setattr(plugin, "register_connector", broken)
    with caplog.at_level(logging.ERROR):
        plugin.register()
    assert "no factory in this vLLM" in caplog.text
    assert plugin.CONNECTOR_NAME not in registry


@pytest.mark.parametrize(
    "allowed,reason", [("other", "VLLM_PLUGINS='other' excludes"), ("", "VLLM_PLUGINS='' excludes")]
)
def test_a_late_fallback_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, allowed: str, reason: str
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    monkeypatch.setattr(layout_fallback, "installed", lambda: False)
    monkeypatch.setattr(layout_fallback, "install", lambda: layout_fallback.Installation.INSTALLED)
    with caplog.at_level(logging.WARNING):
        plugin.ensure_layout_fallback()
    assert reason in caplog.text
    assert "VLLM_KV_CACHE_LAYOUT" in caplog.text


def test_a_loaded_plugin_is_not_warned_about(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(layout_fallback, "installed", lambda: True)
    plugin.ensure_layout_fallback()
    assert caplog.text == ""
