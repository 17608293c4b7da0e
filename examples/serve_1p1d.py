"""One prefill engine at TP1, one decode engine at TP2, one router: read it, change it, run it.

    python examples/serve_1p1d.py [--model FOLDER] [--logs FOLDER]

Prints the router's address and serves until Ctrl-C. On GPUs give each engine its own devices
(`environment={"CUDA_VISIBLE_DEVICES": "0"}`), `arguments=()`, and `"mooncake_protocol": "rdma"`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from client import completion_body
from deployment import Deployment, EngineConfig, RouterConfig, end_on_signals
from tiny_model import ensure_tiny_model

HEALTHY_WITHIN_S = 300.0
BUILD = Path(__file__).resolve().parents[1] / "build"

Waiting = Callable[[list[str]], None]


def prefill_engine(model: Path) -> EngineConfig:
    """The producer: computes prompts and keeps their KV until the decode engine has read it."""
    return EngineConfig(name="prefill", model=model, role="kv_producer", tensor_parallel=1)


def decode_engine(model: Path) -> EngineConfig:
    """The consumer: reads each prompt's KV, half of the heads on each of its two ranks, and answers."""
    return EngineConfig(name="decode", model=model, role="kv_consumer", tensor_parallel=2, failure_policy="fail")


def start_1p1d(
    deployment: Deployment, model: Path, waiting: Waiting | None = None
) -> tuple[RouterConfig, EngineConfig]:
    """Start all three and return the router and the decode engine once everything answers."""
    prefill, decode = prefill_engine(model), decode_engine(model)
    deployment.start(prefill)
    deployment.start(decode)
    deployment.wait_healthy(HEALTHY_WITHIN_S, waiting)
    # Only now: the router asks the producer's bootstrap server for its engine id when it starts.
    router = RouterConfig(name="router", prefill=(prefill,), decode=(decode,))
    deployment.start(router)
    deployment.wait_healthy(30.0, waiting)
    return router, decode


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(description="TP1 -> TP2 deployment of a tiny model")
    parser.add_argument("--model", type=Path, help="default: a seeded tiny Qwen3 made on the spot")
    parser.add_argument("--logs", type=Path, default=BUILD / "serve_1p1d")
    arguments = parser.parse_args()
    end_on_signals()
    model = arguments.model or ensure_tiny_model(BUILD / "models")
    with Deployment(arguments.logs) as deployment:
        print(f"starting; logs in {arguments.logs}", flush=True)
        router, decode = start_1p1d(deployment, model)
        body = json.dumps(completion_body([5, 6, 7, 8], max_tokens=8))
        print(f"router {router.url}, decode engine alone {decode.url}; Ctrl-C ends everything. Try:")
        print(f"  curl {router.url}/v1/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)
        deployment.watch()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
