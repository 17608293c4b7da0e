"""Attention whose pages are token-major on one side, on both or on none, between TP1 and TP2, both ways.

vLLM's CPU kernels read head-major pages only, so these engines attend with the plugin in `torch_backend/`. It offers
BLNHC before BLHNC, as backends of hybrids do, and this package knows its page format by declaration only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deployment import CPU_ARGUMENTS, EngineConfig
from serve_1p1d import BUILD
from tiny_model import TinyModel, ensure_tiny_model
from transfers import counted

from mooncake_hetero_tp.vllm_adapter.layout_fallback import SWITCH
from tests.e2e.pair import ANSWER_TOKENS, Pair, ask, ask_alone, new_prompt, running_pair
from tests.e2e.residue import eventually
from tests.e2e.torch_backend.torch_attention import LAYOUTS_SETTING, NAME

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

PLUGINS = Path(__file__).with_name("torch_backend")
TP1, TP2 = 0, 1
BOTH_WAYS = pytest.mark.parametrize(
    "source,target", [pytest.param(TP1, TP2, id="TP1->TP2"), pytest.param(TP2, TP1, id="TP2->TP1")]
)
AT_ONCE = 4
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 97, 129, 300, 700)
PREFILL_CHUNK = 256
"""Tokens of a step: longer prompts are computed in chunks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """How one engine comes to its layout, and which one that is."""

    layout: str
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    block_size: int = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """The TP1 and the TP2 engine, how they move bytes, and KV heads of their model."""

    sides: tuple[Side, Side]
    mode: str
    descriptors: tuple[int, ...]
    """Of a pull of `PULLED_TOKENS`, all ranks together: one of these, which `auto` chooses."""
    kv_heads: int = 4
    """Four: two heads a page at TP2 too, so that their order shows on either side."""


KEPT = Side(layout="BLHNC")
"""The connector asks for LBHNC, which the backend does not offer; the fallback keeps its order."""
NOT_KEPT = Side(layout="BLNHC", environment={SWITCH: "0"})
FORCED = Side(layout="BLNHC", environment={"VLLM_KV_CACHE_LAYOUT": "BLNHC"})
NO_CHOICE = Side(layout="LBNHC", environment={LAYOUTS_SETTING: "LBNHC"}, block_size=64)
PULLED_TOKENS = 128
BLOCKS, LAYERS = PULLED_TOKENS // 32, TinyModel().layers
STAGED = 2
"""The TP1 rank and either TP2 rank exchange one packed piece."""
BY_TOKEN_AND_HEAD = 4 * PULLED_TOKENS * LAYERS
VARIANTS = {
    "head-major is kept": Variant(sides=(KEPT, KEPT), kv_heads=2, mode="direct", descriptors=(2 * BLOCKS * LAYERS,)),
    "token-major, direct": Variant(
        sides=(FORCED, FORCED), kv_heads=2, mode="direct", descriptors=(2 * PULLED_TOKENS * LAYERS,)
    ),
    "token-major, staged": Variant(sides=(FORCED, FORCED), mode="staged", descriptors=(STAGED,)),
    "token-major at TP1": Variant(sides=(NOT_KEPT, KEPT), mode="direct", descriptors=(BY_TOKEN_AND_HEAD,)),
    "token-major at TP2": Variant(sides=(KEPT, NOT_KEPT), mode="auto", descriptors=(STAGED, BY_TOKEN_AND_HEAD)),
    "nothing else at TP1": Variant(sides=(NO_CHOICE, KEPT), mode="staged", descriptors=(STAGED,)),
}


@dataclasses.dataclass(frozen=True)
class Running:
    """A variant's engines and their model."""

    pair: Pair
    variant: Variant
    sizes: TinyModel
    model: Path


def engine_of(variant: Variant, side: Side, size: int, model: Path) -> EngineConfig:
    return EngineConfig(
        name=f"tp{size}",
        model=model,
        role="kv_both",
        tensor_parallel=size,
        block_size=side.block_size,
        extra_config={
            "mooncake_protocol": "tcp",
            "transfer_mode": variant.mode,
            "backend_encodings": {NAME: "packed"},
        },
        arguments=(*CPU_ARGUMENTS, "--max-num-batched-tokens", str(PREFILL_CHUNK)),
        environment={**side.environment, "PYTHONPATH": str(PLUGINS), "MC_TCP_LANES_PER_PEER": "1"},
    )


@pytest.fixture(scope="module", params=VARIANTS)
def running(request: pytest.FixtureRequest, logs: Path) -> Iterator[Running]:
    variant = VARIANTS[request.param]
    sizes = TinyModel(kv_heads=variant.kv_heads)
    model = ensure_tiny_model(BUILD / "models", sizes)
    one, two = (engine_of(variant, side, size, model) for size, side in zip((1, 2), variant.sides, strict=True))
    folder = logs / request.param.replace(" ", "-")
    with running_pair((one, two), [(one, two), (two, one)], folder) as pair:
        for producer, consumer in ((one, two), (two, one)):
            assert ask(pair.router(producer, consumer), new_prompt(40)).error is None
        pair.remember_idle()
        yield Running(pair, variant, sizes, model)


def test_engines_have_the_layouts(running: Running) -> None:
    for engine, side in zip(running.pair.engines, running.variant.sides, strict=True):
        assert f"Using {side.layout} KV cache layout." in running.pair.log_of(engine)


def test_the_backend_attends_as_transformers_does(running: Running) -> None:
    prompts = [new_prompt(length) for length in (40, 300)]
    expected = greedy_answers(running.model, prompts)
    for engine in running.pair.engines:
        assert [ask_alone(engine, prompt, ignore_eos=True).tokens for prompt in prompts] == expected


def greedy_answers(model: Path, prompts: Sequence[list[int]]) -> list[tuple[int, ...]]:
    """What `transformers` answers, from the whole text so far each time."""
    import torch
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    texts = [list(prompt) for prompt in prompts]
    with torch.inference_mode():
        for text in texts:
            for _ in range(ANSWER_TOKENS):
                text.append(int(reference(torch.tensor([text])).logits[0, -1].argmax()))
    return [tuple(text[-ANSWER_TOKENS:]) for text in texts]


@BOTH_WAYS
def test_answers_are_those_of_the_decode_engine_alone(running: Running, source: int, target: int) -> None:
    pair = running.pair
    producer, consumer = pair.engines[source], pair.engines[target]
    prompts = [new_prompt(length) for length in LENGTHS]
    before = counted(consumer.url)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda prompt: ask(pair.router(producer, consumer), prompt), prompts))
    assert [answer.error for answer in answers if answer.error] == []
    assert [answer.tokens for answer in answers] == [ask_alone(consumer, prompt).tokens for prompt in prompts]
    tokens = sum(len(prompt) - 1 for prompt in prompts)
    assert eventually(lambda: (counted(consumer.url) - before).bytes == tokens * running.sizes.kv_bytes_per_token)
    assert pair.leftovers() == []


@BOTH_WAYS
def test_a_pull_has_the_pieces_that_the_layouts_make(running: Running, source: int, target: int) -> None:
    """Directly a head's page where both sides are head-major, else as much of a token's row as lies together on both."""
    producer, consumer = running.pair.engines[source], running.pair.engines[target]
    before, pulled_bytes = counted(consumer.url), PULLED_TOKENS * running.sizes.kv_bytes_per_token
    assert ask(running.pair.router(producer, consumer), new_prompt(PULLED_TOKENS + 1)).error is None
    assert eventually(lambda: (counted(consumer.url) - before).bytes == pulled_bytes)
    assert (counted(consumer.url) - before).descriptors in running.variant.descriptors
