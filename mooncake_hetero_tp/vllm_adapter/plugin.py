"""The `vllm.general_plugins` entry point: makes the connector known by name and keeps the head order.

vLLM calls `register` in every process (API server, engine core, workers), some of them forked from one
another, so it is idempotent. It runs for every vLLM on the machine, also those that use no connector of
ours, so it never raises.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os

from mooncake_hetero_tp.vllm_adapter import layout_fallback
from mooncake_hetero_tp.vllm_adapter.logs import adopt_vllm_logging

logger = logging.getLogger(__name__)

CONNECTOR_NAME = "MooncakeHeteroTPConnector"
CONNECTOR_MODULE = "mooncake_hetero_tp.connector"
PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "mooncake_hetero_tp"


def register() -> None:
    """Register the connector and install the layout fallback; never raises."""
    for step in (adopt_vllm_logging, register_connector, layout_fallback.install):
        try:
            step()
        except Exception:
            logger.exception("mooncake-hetero-tp: %s failed; vLLM goes on without it", step.__qualname__)


def register_connector() -> bool:
    """Make `MooncakeHeteroTPConnector` known to vLLM's factory; False where it already was."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    if CONNECTOR_NAME in KVConnectorFactory._registry:  # noqa: SLF001  # register_connector raises on repeats
        return False
    KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
    return True


def ensure_layout_fallback() -> None:
    """For a connector loaded by module path: install the fallback where it still can act, and say why not.

    vLLM loads the class inside its resolver when the plugin did not run in that process; a wrapper
    installed then comes too late for this engine, so the reason is logged with the remedy.
    """
    if layout_fallback.installed():
        return
    result = layout_fallback.install()
    if result is layout_fallback.Installation.INSTALLED:
        logger.warning(
            "KV layout fallback was installed late, because %s: if the layout below is token-major, set "
            "VLLM_KV_CACHE_LAYOUT to a head-major layout that the backends offer",
            _why_not_loaded(),
        )


def _why_not_loaded() -> str:
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed!r} excludes {PLUGIN_NAME!r}"
    if not importlib.metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME):
        return "the package is not installed (no entry point found), only importable"
    return "vLLM had not loaded its general plugins in this process"
