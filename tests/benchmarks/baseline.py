"""The connectors that a user would otherwise pick, as engines that the examples' harness can start.

vLLM's MooncakeConnector asks for an accelerator that it then does not use over TCP; `baseline_site/`
answers in its place. vLLM's NixlConnector needs `nixl`, which is installed into a folder of its own:

    tools/setup_env.sh --bench

One pair, TP1 -> TP2, 24 prompts, 8 in flight, answers compared with the decode engine alone:

    python -m tests.benchmarks.baseline mooncake|nixl
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# As pytest's `pythonpath` does: the examples are scripts, not a package.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from client import Answer, alone, complete, completion_body
from demo import ANSWER_TOKENS, Prompt, make_prompts
from deployment import HOST, Deployment, EngineConfig, RouterConfig, free_port
from serve_1p1d import BUILD, HEALTHY_WITHIN_S, decode_engine, prefill_engine
from tiny_model import ensure_tiny_model

SITE = Path(__file__).with_name("baseline_site")
NIXL = BUILD / "nixl"


def _with_path(engine: EngineConfig, folder: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    return {**engine.environment, "PYTHONPATH": path, **more}


def mooncake_baseline(engine: EngineConfig) -> EngineConfig:
    """The same engine with vLLM's own MooncakeConnector."""
    return dataclasses.replace(engine, connector="MooncakeConnector", environment=_with_path(engine, SITE))


class NixlEngine(EngineConfig):
    """An engine with vLLM's NixlConnector, which keeps its KV in host memory."""

    def transfer_config(self) -> dict[str, object]:
        return {**super().transfer_config(), "kv_buffer_device": "cpu"}


def nixl_baseline(engine: EngineConfig) -> EngineConfig:
    """The same engine with vLLM's NixlConnector and a side channel port of its own."""
    fields = {field.name: getattr(engine, field.name) for field in dataclasses.fields(engine)}
    side_channel = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    changed = {
        "connector": "NixlConnector",
        "extra_config": {},
        "environment": _with_path(engine, NIXL, **side_channel),
    }
    return NixlEngine(**{**fields, **changed})


BASELINES = {"mooncake": mooncake_baseline, "nixl": nixl_baseline}
"""By the router's name for the dialect."""


def compare(router: str, decode: str, prompts: Sequence[Prompt], in_flight: int) -> tuple[list[Answer], int, float]:
    """Answers through the router, how many are those of the decode engine alone, seconds of traffic."""
    bodies = [completion_body(prompt, ANSWER_TOKENS) for prompt in prompts]
    started = time.monotonic()
    with ThreadPoolExecutor(in_flight) as pool:
        answers = list(pool.map(lambda body: complete(router, body), bodies))
    seconds = time.monotonic() - started
    own = [alone(decode, body, f"alone-{index}") for index, body in enumerate(bodies)]
    identical = sum(a.error is None and a.tokens == b.tokens for a, b in zip(answers, own, strict=True))
    return answers, identical, seconds


def main(dialect: str) -> None:
    """Run the baseline and print what came of it."""
    baseline, model = BASELINES[dialect], ensure_tiny_model(BUILD / "models")
    prefill, decode = baseline(prefill_engine(model)), baseline(decode_engine(model))
    with Deployment(BUILD / "baseline" / dialect) as deployment:
        deployment.start(prefill)
        deployment.start(decode)
        deployment.wait_healthy(HEALTHY_WITHIN_S)
        router = RouterConfig("router", (prefill,), (decode,), dialect=dialect)
        deployment.start(router)
        deployment.wait_healthy(30.0)
        answers, identical, seconds = compare(router.url, decode.url, make_prompts(24), in_flight=8)
    errors = [answer.error for answer in answers if answer.error]
    print(f"{dialect}: {identical} of {len(answers)} identical, {len(errors)} errors, {seconds:.1f} s {errors[:1]}")


if __name__ == "__main__":
    main(sys.argv[1])
