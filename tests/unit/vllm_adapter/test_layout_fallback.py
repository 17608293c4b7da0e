"""layout_fallback: wrapping, untouched calls and the switch, on stand-in modules."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mooncake_hetero_tp.vllm_adapter import layout_fallback
from mooncake_hetero_tp.vllm_adapter.layout_fallback import Installation

HOME, IMPORTER = "mht_fake_vllm_utils", "mht_fake_vllm_core"


def vllm_config(layout: str | None = None) -> Any:
    return SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout=layout))


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module like vLLM's that holds a resolver, and one that has imported it by name."""
    module, importer = ModuleType(HOME), ModuleType(IMPORTER)
    module.seen = []  # type: ignore[attr-defined]
    module.wish = "LBHNC"  # type: ignore[attr-defined]

    def resolve_kv_cache_layout(config: Any, supported_layouts: Any, *args: Any, **kwargs: Any) -> Any:
        del config
        module.seen.append((supported_layouts, args, kwargs))
        return supported_layouts[0][0] if supported_layouts else None

    module.resolve_kv_cache_layout = resolve_kv_cache_layout  # type: ignore[attr-defined]
    module.get_kv_connector_cache_layout = lambda _config: module.wish  # type: ignore[attr-defined]
    importer.resolve_kv_cache_layout = resolve_kv_cache_layout  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, HOME, module)
    monkeypatch.setitem(sys.modules, IMPORTER, importer)
    monkeypatch.setattr(layout_fallback, "_HOME", HOME)
    monkeypatch.setattr(layout_fallback, "_IMPORTERS", (IMPORTER,))
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    monkeypatch.delenv(layout_fallback.SWITCH, raising=False)
    return module


def resolver(module: ModuleType) -> Any:
    return module.resolve_kv_cache_layout


def test_install_wraps_once_and_where_the_name_was_imported(home: ModuleType) -> None:
    original = resolver(home)
    assert not layout_fallback.installed()
    assert layout_fallback.install() is Installation.INSTALLED
    wrapper = resolver(home)
    assert wrapper is not original
    assert wrapper.__wrapped__ is original
    assert resolver(sys.modules[IMPORTER]) is wrapper
    assert layout_fallback.installed()
    assert layout_fallback.install() is Installation.PRESENT
    assert resolver(home) is wrapper


def test_a_later_importer_is_rebound(home: ModuleType) -> None:
    layout_fallback.install()
    sys.modules[IMPORTER].resolve_kv_cache_layout = resolver(home).__wrapped__  # type: ignore[attr-defined]
    assert not layout_fallback.installed()
    assert layout_fallback.install() is Installation.PRESENT
    assert layout_fallback.installed()


def test_a_wrapper_around_ours_counts_as_installed(home: ModuleType) -> None:
    layout_fallback.install()
    inner = resolver(home)

    def outer(*args: Any) -> Any:
        return inner(*args)

    outer.__wrapped__ = inner  # type: ignore[attr-defined]
    home.resolve_kv_cache_layout = outer  # type: ignore[attr-defined]
    assert layout_fallback.install() is Installation.PRESENT


@pytest.mark.parametrize("value", ["0", "false", "OFF"])
def test_the_switch(home: ModuleType, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(layout_fallback.SWITCH, value)
    original = resolver(home)
    assert layout_fallback.install() is Installation.DISABLED
    assert resolver(home) is original


def test_a_vllm_without_the_resolver_is_left_alone(home: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    del home.resolve_kv_cache_layout
    assert layout_fallback.install() is Installation.UNSUPPORTED
    monkeypatch.setattr(layout_fallback, "_HOME", "mht_no_such_module")
    assert layout_fallback.install() is Installation.UNSUPPORTED


def test_lists_are_reordered_for_every_worker_and_arguments_pass(home: ModuleType) -> None:
    layout_fallback.install()
    lists = [["BLNHC", "BLHNC"], ["BLNHC", "BLHNC"]]
    assert resolver(home)(vllm_config(), lists, "specs", extra=1) == "BLHNC"
    (given, args, kwargs) = home.seen[0]
    assert given == [["BLHNC", "BLNHC"], ["BLHNC", "BLNHC"]]
    assert (args, kwargs) == (("specs",), {"extra": 1})
    assert lists == [["BLNHC", "BLHNC"], ["BLNHC", "BLHNC"]], "the caller's lists stay as they are"


def test_legacy_names_are_understood(home: ModuleType) -> None:
    layout_fallback.install()
    home.wish = "HND"  # type: ignore[attr-defined]
    assert resolver(home)(vllm_config(), [["BLNHC", "BLHNC"]]) == "BLHNC"


@pytest.mark.parametrize(
    "case",
    ["nothing asked", "env decides", "already resolved", "lists differ", "no lists", "unknown wish", "in order"],
)
def test_untouched_calls_get_the_very_same_object(home: ModuleType, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    layout_fallback.install()
    config, lists = vllm_config(), [["BLNHC", "BLHNC"]]
    if case == "nothing asked":
        home.wish = None  # type: ignore[attr-defined]
    elif case == "env decides":
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLNHC")
    elif case == "already resolved":
        config = vllm_config("BLNHC")
    elif case == "lists differ":
        lists = [["BLNHC", "BLHNC"], ["BLHNC", "BLNHC"]]
    elif case == "no lists":
        lists = []
    elif case == "unknown wish":
        home.wish = "XYZ"  # type: ignore[attr-defined]
    else:
        home.wish = "BLNHC"  # type: ignore[attr-defined]
    resolver(home)(config, lists)
    assert home.seen[0][0] is lists


def test_the_wish_may_fail_in_vllm_itself(home: ModuleType) -> None:
    """MultiConnector raises when its children disagree; vLLM says so in its own words."""
    layout_fallback.install()

    def disagree(_config: Any) -> str:
        raise ValueError("children disagree")

    home.get_kv_connector_cache_layout = disagree  # type: ignore[attr-defined]
    lists = [["BLNHC", "BLHNC"]]
    assert resolver(home)(vllm_config(), lists) == "BLNHC"
    assert home.seen[0][0] is lists
