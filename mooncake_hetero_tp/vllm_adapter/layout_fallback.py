"""Keeps the head/token order a KV connector asked for when no backend offers the exact layout.

vLLM 0.32 and 0.33 drop an unsupported request and take the backends' first layout, even a token-major
one when a head-major one is listed further down (vllm#59594, merged later upstream). The resolver is
not re-implemented: its input lists are reordered (wanted layout, same head/token order, rest; stable)
and handed on, so its own narrowing (mixed shapes, DCP) stays in force. In a vLLM that keeps the order
itself the reordering changes nothing.

The rule holds for every connector's request. `MHT_LAYOUT_FALLBACK=0` turns it off.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from types import ModuleType
from typing import Any

from mooncake_hetero_tp.core.layout import preference_order
from mooncake_hetero_tp.errors import HeteroTPError

logger = logging.getLogger(__name__)

SWITCH = "MHT_LAYOUT_FALLBACK"
_HOME = "vllm.v1.attention.backends.utils"
_IMPORTERS = ("vllm.v1.engine.core",)
"""Modules that bind the resolver by name; patched where already imported (facts: engine core, spawned)."""
_RESOLVER = "resolve_kv_cache_layout"
_MARK = "_mht_layout_fallback"
_LEGACY_NAMES = {"NHD": "LBNHC", "HND": "LBHNC"}
"""vLLM's names before its RFC 42082; `vllm.config.cache` still takes them."""

Resolver = Callable[..., Any]


class Installation(StrEnum):
    """What `install` found or did."""

    INSTALLED = "installed"
    """The resolver is wrapped now."""
    PRESENT = "present"
    """It was wrapped before."""
    DISABLED = "disabled"
    """`MHT_LAYOUT_FALLBACK=0`."""
    UNSUPPORTED = "unsupported"
    """This vLLM has no such resolver."""


def install() -> Installation:
    """Wrap vLLM's layout resolver; idempotent, in every process that loads general plugins."""
    if os.environ.get(SWITCH, "1").strip().lower() in ("0", "false", "off", "no"):
        logger.info("KV layout fallback is off (%s=%s)", SWITCH, os.environ[SWITCH])
        return Installation.DISABLED
    home = _home_module()
    resolver = getattr(home, _RESOLVER, None)
    if home is None or not callable(resolver):
        logger.info("KV layout fallback: this vLLM has no %s.%s; nothing to do", _HOME, _RESOLVER)
        return Installation.UNSUPPORTED
    if is_wrapped(resolver):
        _rebind_importers(resolver)
        return Installation.PRESENT
    wrapper = wrap(resolver, home)
    setattr(home, _RESOLVER, wrapper)
    _rebind_importers(wrapper)
    return Installation.INSTALLED


def installed() -> bool:
    """Whether the resolver that this process would call is wrapped."""
    modules = [sys.modules.get(name) for name in (_HOME, *_IMPORTERS)]
    resolvers = [getattr(module, _RESOLVER, None) for module in modules if module is not None]
    return bool(resolvers) and all(is_wrapped(resolver) for resolver in resolvers)


def is_wrapped(resolver: object) -> bool:
    """Whether `resolver`, or something it wraps, is ours."""
    while resolver is not None:
        if hasattr(resolver, _MARK):
            return True
        resolver = getattr(resolver, "__wrapped__", None)
    return False


def wrap(resolver: Resolver, home: ModuleType) -> Resolver:
    """`resolver` behind a reordering of its `supported_layouts`."""

    @functools.wraps(resolver)
    def resolve_keeping_order(vllm_config: Any, supported_layouts: Any, *args: Any, **kwargs: Any) -> Any:
        ordered = _reordered(vllm_config, supported_layouts, home)
        return resolver(vllm_config, ordered, *args, **kwargs)

    setattr(resolve_keeping_order, _MARK, True)
    return resolve_keeping_order


def _reordered(vllm_config: Any, supported_layouts: Any, home: ModuleType) -> Any:
    """The lists to hand on; the very same object wherever the fallback has no say."""
    try:
        requested = _request(vllm_config, home)
        if requested is None or not _agree(supported_layouts):
            return supported_layouts
        offered = list(supported_layouts[0])
        ordered = preference_order(requested, offered)
    except (HeteroTPError, ValueError, AttributeError, TypeError) as error:
        logger.warning("KV layout fallback: left to vLLM (%s: %s)", type(error).__name__, error)
        return supported_layouts
    if ordered == offered:
        return supported_layouts
    if requested not in offered:
        logger.info(
            "KV connector asked for layout %s, the backends offer %s; keeping its head/token order: %s "
            "(vllm#59594; %s=0 disables this)",
            *(requested, offered, ordered, SWITCH),
        )
    return [list(ordered) for _ in supported_layouts]


def _request(vllm_config: Any, home: ModuleType) -> str | None:
    """The connector's request, or None where something else decides or nothing is asked."""
    if vllm_config.cache_config.kv_cache_layout is not None or _explicit_layout():
        return None
    ask = getattr(home, "get_kv_connector_cache_layout", None)
    requested = ask(vllm_config) if callable(ask) else None
    return None if requested is None else _LEGACY_NAMES.get(str(requested), str(requested))


def _explicit_layout() -> str | None:
    envs = importlib.import_module("vllm.envs")
    value = getattr(envs, "VLLM_KV_CACHE_LAYOUT", None)
    return None if value is None else str(value)


def _agree(supported_layouts: Sequence[Sequence[str]]) -> bool:
    """Workers report equal, non-empty lists; otherwise vLLM raises its own error."""
    return bool(supported_layouts) and all(
        names and list(names) == list(supported_layouts[0]) for names in supported_layouts
    )


def _home_module() -> ModuleType | None:
    try:
        return importlib.import_module(_HOME)
    except ModuleNotFoundError:
        return None


def _rebind_importers(wrapper: Resolver) -> None:
    for name in _IMPORTERS:
        module = sys.modules.get(name)
        bound = getattr(module, _RESOLVER, None)
        if module is not None and bound is not None and not is_wrapped(bound):
            setattr(module, _RESOLVER, wrapper)
