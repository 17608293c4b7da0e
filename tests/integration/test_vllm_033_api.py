"""The connector against vLLM 0.33's own Python, unpacked from its wheel: it does not run here, but its API does.

A subprocess, because one process holds one vLLM. Set-up unpacks the wheel to `build/vllm-0.33.0`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
UNPACKED = ROOT / "build" / "vllm-0.33.0"

PROBE = """
import inspect, json
import torch
import vllm.v1.attention.backends.utils as home
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1 import kv_cache_interface as kinds
from vllm.version import __version__
from types import SimpleNamespace
from mooncake_hetero_tp.vllm_adapter import plugin

plugin.register()
plugin.register()
transfer = KVTransferConfig(kv_connector="MooncakeHeteroTPConnector", kv_role="kv_both", engine_id="E")
connector = KVConnectorFactory.get_connector_class(transfer)

unlike = {}
for name, theirs in inspect.getmembers(base.KVConnectorBase_V1, callable):
    ours = getattr(connector, name)
    if name.startswith("_") or getattr(ours, "__func__", ours) is getattr(theirs, "__func__", theirs):
        continue
    wanted, got = (list(inspect.signature(hook).parameters) for hook in (theirs, ours))
    if got[: len(wanted)] != wanted:
        unlike[name] = [wanted, got]

def resolve(offered):
    config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_layout=None),
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(use_mla=False),
    )
    return home.resolve_kv_cache_layout(config, [offered, offered], ()).name

# The whole adapter on 0.33's specs, views and requests.
from tests.unit.vllm_adapter.doubles import Model
from tests.unit.vllm_adapter.requests import DECODE, PREFILL, Blocks, NotedReleases, finish, make_request
from mooncake_hetero_tp.config import HeteroTPConfig
from mooncake_hetero_tp.core.tables import validate_table
from mooncake_hetero_tp.vllm_adapter.probe import build_table
from mooncake_hetero_tp.vllm_adapter.scheduler import SchedulerSide
from tests.unit.vllm_adapter.doubles import stub_vllm_config
from vllm.v1.request import RequestStatus

encodings = {}
for layout in [layout.name for layout in kinds.KVCacheLayout]:
    model = Model(layout=layout, tp_size=2, tp_rank=1)
    config = model.cache_config()
    table = build_table(model.engine(config), model.allocate(config))
    validate_table(table)
    encodings[layout] = sorted({region.encoding for region in table.regions})

model = Model()
draft = model.cache_config(model.spec(is_draft=True))
side = SchedulerSide(
    stub_vllm_config(model), model.cache_config(), HeteroTPConfig.from_extra_config({}), "10.0.0.1", NotedReleases()
)
prefill, decode = make_request("p", 40, PREFILL), make_request("d", 40, DECODE | {"transfer_id": "t2"})
for request in (prefill, decode):
    side.on_new_request(request)
count, load_async = side.get_num_new_matched_tokens(decode, 16)
side.update_state_after_alloc(decode, Blocks([1, 2, 3]), count)
kept, reply = side.request_finished(finish(prefill, RequestStatus.FINISHED_LENGTH_CAPPED), ([4, 5, 6],))
step = side.build_connector_meta()

print(json.dumps({
    "version": __version__,
    "abstract": inspect.isabstract(connector),
    "supports_hma": base.supports_hma(connector),
    "unlike": unlike,
    "sleep": connector.supports_sleep_mode(transfer),
    "new_hooks": [n for n in ("unregister_kv_caches", "restore_kv_caches") if n in vars(connector)],
    "kept_order": resolve(["BLNHC", "BLHNC"]),
    "supported": resolve(["LBNHC", "LBHNC"]),
    "encodings": encodings,
    "draft_layers": sorted(build_table(model.engine(draft), model.allocate(draft)).draft_layers) == sorted(model.names),
    "loads": [count, load_async, [p.request_id for p in step.pulls], [k.request_id for k in step.kept], kept],
}))
"""


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    """What the probe found in a process whose vLLM is 0.33."""
    if not UNPACKED.is_dir():
        pytest.fail(f"{UNPACKED} is missing; run `make setup`, which unpacks the wheel there")
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{UNPACKED}:{ROOT}", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    answer: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return answer


def test_it_is_033_that_answers(answer: dict[str, Any]) -> None:
    assert answer["version"].startswith("0.33")


def test_every_hook_is_there_and_takes_what_033_passes(answer: dict[str, Any]) -> None:
    assert answer["abstract"] is False
    assert answer["supports_hma"] is True
    assert answer["unlike"] == {}


def test_the_new_hooks(answer: dict[str, Any]) -> None:
    """The default of `supports_sleep_mode` is True: sleeping would free what peers read from."""
    assert answer["sleep"] is False
    assert answer["new_hooks"] == ["unregister_kv_caches", "restore_kv_caches"]


def test_the_plugin_registers_and_the_layout_order_is_kept(answer: dict[str, Any]) -> None:
    assert answer["kept_order"] == "BLHNC"
    assert answer["supported"] == "LBHNC"


def test_the_probe_describes_033s_views(answer: dict[str, Any]) -> None:
    assert len(answer["encodings"]) == 6
    assert set(map(tuple, answer["encodings"].values())) == {("packed",)}
    assert answer["draft_layers"] is True


def test_the_scheduler_side_runs_on_033s_requests(answer: dict[str, Any]) -> None:
    assert answer["loads"] == [23, True, ["d"], ["p"], True]
