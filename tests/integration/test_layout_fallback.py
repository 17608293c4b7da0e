"""The layout fallback in front of the installed vLLM's own `resolve_kv_cache_layout` (vllm#59594)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import permutations
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.attention.backends.utils as home
import vllm.v1.engine.core as engine_core
from vllm.config import KVTransferConfig
from vllm.v1 import kv_cache_interface as kinds

from mooncake_hetero_tp.core.layout import VLLM_LAYOUTS, KVLayout, keep_order_fallback
from mooncake_hetero_tp.vllm_adapter import layout_fallback

pytestmark = pytest.mark.vllm

MODULE = "mht_test_wish"


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The installed resolver as vLLM ships it, in both places; whatever a test installs is undone."""
    original = home.resolve_kv_cache_layout
    while hasattr(original, "__wrapped__"):
        original = original.__wrapped__
    monkeypatch.setattr(home, "resolve_kv_cache_layout", original)
    monkeypatch.setattr(engine_core, "resolve_kv_cache_layout", original)
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    monkeypatch.delenv(layout_fallback.SWITCH, raising=False)
    return original  # type: ignore[no-any-return]


@pytest.fixture
def wish(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Sets what a connector of somebody else's asks for."""
    module = ModuleType(MODULE)

    class WishConnector:
        asked: str | None = None

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None: ...

        @classmethod
        def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
            return cls.asked

    module.WishConnector = WishConnector  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)

    def ask(layout: str | None) -> None:
        WishConnector.asked = layout

    return ask


def config() -> Any:
    transfer = KVTransferConfig(
        kv_connector="WishConnector", kv_role="kv_both", kv_connector_module_path=MODULE, engine_id="e"
    )
    cache = SimpleNamespace(kv_cache_layout=None)
    return SimpleNamespace(cache_config=cache, kv_transfer_config=transfer)


def resolve(offered: Sequence[str], specs: Sequence[Any] = (), workers: int = 2) -> str:
    """What the engine core would get from workers that all offer `offered`."""
    vllm_config = config()
    result = engine_core.resolve_kv_cache_layout(vllm_config, [list(offered)] * workers, specs)
    assert vllm_config.cache_config.kv_cache_layout == result.name
    return str(result.name)


@pytest.mark.parametrize(
    "asked,offered,expected",
    [
        ("LBHNC", ["BLNHC", "BLHNC"], "BLHNC"),
        ("LBHNC", ["LBNHC", "BLNHC", "LHBNC", "BLHNC"], "LHBNC"),
        ("LBHNC", ["LBNHC"], "LBNHC"),
        ("BLHNC", ["LBNHC", "LBHNC"], "LBHNC"),
        ("LBNHC", ["LBHNC", "BLNHC"], "BLNHC"),
        ("LBNHC", ["BLHNC", "LBHNC"], "BLHNC"),
        ("HND", ["BLNHC", "BLHNC"], "BLHNC"),
        ("LBHNC", ["LBNHC", "LBHNC"], "LBHNC"),
    ],
)
def test_the_order_is_kept(
    unpatched: Any, wish: Callable[[str | None], None], asked: str, offered: list[str], expected: str
) -> None:
    del unpatched
    layout_fallback.install()
    wish(asked)
    assert resolve(offered) == expected


def test_without_the_fallback_this_vllm_loses_the_order(unpatched: Any, wish: Callable[[str | None], None]) -> None:
    """If this fails, vLLM keeps the order itself and the fallback may go."""
    del unpatched
    wish("LBHNC")
    assert resolve(["BLNHC", "BLHNC"]) == "BLNHC"


def test_every_wish_on_every_short_list(unpatched: Any, wish: Callable[[str | None], None]) -> None:
    del unpatched
    layout_fallback.install()
    for asked in VLLM_LAYOUTS:
        wish(asked)
        for length in (1, 2, 3):
            for offered in permutations(VLLM_LAYOUTS, length):
                expected = asked if asked in offered else keep_order_fallback(asked, offered)
                assert resolve(offered) == expected, (asked, offered)


def test_a_resolver_that_keeps_the_order_itself_is_unchanged(unpatched: Any) -> None:
    """By construction: reordering cannot change what such a resolver takes (the upstream rule)."""
    del unpatched
    wishes = [""]

    def upstream(_config: Any, supported: list[list[str]]) -> str:
        (asked,) = wishes
        return asked if asked in supported[0] else keep_order_fallback(asked, supported[0])

    module = ModuleType(MODULE)
    module.get_kv_connector_cache_layout = lambda _config: wishes[0]  # type: ignore[attr-defined]
    wrapped = layout_fallback.wrap(upstream, module)
    for wishes[0] in VLLM_LAYOUTS:
        for length in (1, 2, 3):
            for offered in permutations(VLLM_LAYOUTS, length):
                lists = [list(offered)] * 2
                assert wrapped(config(), lists) == upstream(None, lists)


def specs_of_unlike_shapes() -> list[Any]:
    common = {"block_size": 16, "num_kv_heads": 2, "dtype": torch.bfloat16}
    return [kinds.FullAttentionSpec(**common, head_size=size) for size in (64, 128)]


def test_narrowing_in_the_resolver_stays_in_force(unpatched: Any, wish: Callable[[str | None], None]) -> None:
    """Specs of unlike shapes need block-compact layouts; the first of the same order *among those* is taken."""
    del unpatched
    layout_fallback.install()
    wish("LBHNC")
    specs = specs_of_unlike_shapes()
    assert resolve(["LBNHC", "LHBNC", "BHLNC", "BLHNC"], specs) == "BLHNC"
    wish("LHBNC")
    assert resolve(["LBNHC", "LHBNC", "BLHNC"], specs) == "BLHNC", "offered, but narrowed away"
    with pytest.raises(ValueError, match="block-compact layout"):
        resolve(["LHBNC", "BHLNC"], specs)


def test_an_explicit_layout_wins_or_fails_as_before(
    unpatched: Any, wish: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    del unpatched
    layout_fallback.install()
    wish("LBHNC")
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLNHC")
    assert resolve(["BLHNC", "BLNHC"]) == "BLNHC"
    with pytest.raises(ValueError, match="VLLM_KV_CACHE_LAYOUT=BLNHC does not satisfy"):
        resolve(["LBHNC"])


def test_a_layout_that_is_already_resolved_stays(unpatched: Any, wish: Callable[[str | None], None]) -> None:
    del unpatched
    layout_fallback.install()
    wish("LBHNC")
    resolved = config()
    resolved.cache_config = SimpleNamespace(
        kv_cache_layout="BLNHC", get_resolved_kv_cache_layout=lambda: kinds.KVCacheLayout.BLNHC
    )
    assert engine_core.resolve_kv_cache_layout(resolved, [["BLHNC"]]).name == "BLNHC"


def test_no_wish_gives_the_backends_choice(unpatched: Any, wish: Callable[[str | None], None]) -> None:
    del unpatched
    layout_fallback.install()
    wish(None)
    assert resolve(["BLNHC", "BLHNC"]) == "BLNHC"


def test_workers_that_disagree_fail_as_before(unpatched: Any, wish: Callable[[str | None], None]) -> None:
    del unpatched
    layout_fallback.install()
    wish("LBHNC")
    with pytest.raises(AssertionError, match="Workers disagree"):
        engine_core.resolve_kv_cache_layout(config(), [["BLNHC", "BLHNC"], ["BLHNC", "BLNHC"]])


def test_the_switch_leaves_vllm_as_it_is(
    unpatched: Any, wish: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(layout_fallback.SWITCH, "0")
    assert layout_fallback.install() is layout_fallback.Installation.DISABLED
    assert home.resolve_kv_cache_layout is unpatched
    wish("LBHNC")
    assert resolve(["BLNHC", "BLHNC"]) == "BLNHC"


def test_install_is_idempotent_in_both_modules(unpatched: Any) -> None:
    assert layout_fallback.install() is layout_fallback.Installation.INSTALLED
    wrapper = home.resolve_kv_cache_layout
    assert wrapper.__wrapped__ is unpatched
    assert engine_core.resolve_kv_cache_layout is wrapper
    assert layout_fallback.install() is layout_fallback.Installation.PRESENT
    assert home.resolve_kv_cache_layout is engine_core.resolve_kv_cache_layout is wrapper


def test_our_six_layouts_are_vllms(unpatched: Any) -> None:
    """Head order is judged by our KVLayout; vLLM's strides must mean the same."""
    del unpatched
    assert [layout.name for layout in kinds.KVCacheLayout] == list(VLLM_LAYOUTS)
    for layout in kinds.KVCacheLayout:
        order = "".join("LBHNC"[dim] for dim in layout.stride_order)
        assert order == layout.name
        head_major = layout.stride_order.index(2) < layout.stride_order.index(3)
        assert KVLayout.from_name(layout.name).is_head_major == head_major
