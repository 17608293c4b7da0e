"""`plan --model DIR --prefill tp=2,pp=2 --decode tp=4`: a case from a model and two engines' settings.

What only the engines themselves could know is set as vLLM does, and told in the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from mooncake_hetero_tp.cli.layers import AttentionLayer, Layer, StateLayer
from mooncake_hetero_tp.cli.limits import DTYPE_BYTES
from mooncake_hetero_tp.cli.models import ModelConfig, model_layers, read_model
from mooncake_hetero_tp.cli.wish import Wish
from mooncake_hetero_tp.core.regions import attention_spans
from mooncake_hetero_tp.core.state_tensors import local_shape
from mooncake_hetero_tp.errors import ConfigError

DEFAULT_BLOCK: Final = 16
"""vLLM's `--block-size` (`CacheConfig.DEFAULT_BLOCK_SIZE`)."""
DEFAULT_LAYOUT: Final = "LBHNC"
NUM_BLOCKS: Final = 64
"""No copy depends on it."""
LARGER_TYPE: Final = 1.5
"""Below this ratio of layer counts vLLM pads the smaller type's groups instead of splitting the larger one's."""

Sides = Mapping[str, Wish]
"""`prefill` and `decode`."""


class ModelCase(msgspec.Struct, frozen=True):
    """A case as `read_case` takes it, and what it takes for granted."""

    case: dict[str, Any]
    assumptions: list[str]


def model_case(directory: Path, sides: Sides) -> ModelCase:
    """The case of a model between two engines.

    Raises:
        ConfigError: a model or settings that cannot be described, by name.
    """
    model = read_model(directory)
    dtype = _cache_dtype(model, sides)
    layers = grouped(model_layers(model, dtype))
    _check_stages(model, layers, sides)
    engines = {name: Engine.of(name, wish, layers, dtype) for name, wish in sides.items()}
    return ModelCase(
        case={
            "producer": engines["prefill"].side,
            "consumer": engines["decode"].side,
            "dtype": dtype,
            "layers": [_plain(layer) for layer in layers],
        },
        assumptions=[*_assumptions(model, layers, dtype), *(told for one in engines.values() for told in one.told)],
    )


def grouped(layers: Sequence[Layer]) -> list[Layer]:
    """The layers in vLLM's KV cache groups: types in the order of their first layers, all groups of like length.

    vLLM: `_get_kv_cache_groups_uniform_page_size`, vllm/v1/core/kv_cache_planning.py. Latents and indexer keys share
    a group (`UniformTypeKVCacheSpecs`).
    """
    types: dict[str, list[Layer]] = {}
    for layer in layers:
        types.setdefault("mla" if layer.kind == "replicated" else layer.kind, []).append(layer)
    counts = [len(members) for members in types.values()]
    length = max(counts) if max(counts) < min(counts) * LARGER_TYPE else min(counts)
    placed: dict[str, int] = {}
    first = 0
    for members in types.values():
        groups = -(-len(members) // length)
        placed |= {layer.name: first + number % groups for number, layer in enumerate(members)}
        first += groups
    return [msgspec.structs.replace(layer, group=placed[layer.name]) for layer in layers]


class Engine(msgspec.Struct, frozen=True):
    """One side of a case, and what was set for it."""

    side: dict[str, Any]
    told: list[str]

    @classmethod
    def of(cls, name: str, wish: Wish, layers: Sequence[Layer], dtype: str) -> Engine:
        """Raises ConfigError for sizes of several groups and for a TP that the model's heads do not allow."""
        block, kernel = (
            _one(name, field, sizes)
            for field, sizes in (("block_size", wish.block_size), ("kernel_block_size", wish.kernel_block_size))
        )
        side = {"tp": wish.tp or 1, "pp": wish.pp or 1, "layout": wish.layout or DEFAULT_LAYOUT}
        side |= {"num_blocks": NUM_BLOCKS, "block_size": block or DEFAULT_BLOCK}
        if kernel:
            side["kernel_block_size"] = kernel
        if any(isinstance(layer, StateLayer) for layer in layers):
            return cls._hybrid(name, side, layers, dtype)
        return cls(side, [] if block else [f"{name}: blocks of {DEFAULT_BLOCK} tokens, vLLM's default"])

    @classmethod
    def _hybrid(cls, name: str, side: dict[str, Any], layers: Sequence[Layer], dtype: str) -> Engine:
        """Pages of all groups are alike: vLLM, `Platform._align_hybrid_block_size`."""
        asked, tp = side["block_size"], side["tp"]
        token, state = token_bytes(layers, tp, dtype), state_bytes(layers, tp, dtype)
        block = aligned_block(asked, side.get("kernel_block_size", DEFAULT_BLOCK), token, state)
        states = {layer.group for layer in layers if isinstance(layer, StateLayer)}
        groups = range(max(layer.group for layer in layers) + 1)
        side |= {"block_size": block, "page_size_padded": [block * token if one in states else None for one in groups]}
        if "kernel_block_size" in side:
            side["kernel_block_size"] = [block if one in states else side["kernel_block_size"] for one in groups]
        grown = f"blocks of {block} tokens" + (f" instead of {asked}" if block != asked else "")
        why = f"so that an attention page ({block * token} bytes) holds a state ({state} bytes, padded to that)"
        return cls(side, [f"{name}: {grown}, as vLLM aligns them at TP{tp} {why}"])


def aligned_block(block: int, kernel: int, token: int, state: int) -> int:
    """Tokens of a block whose page of `token` bytes a token is as long as a state, in steps of the kernel block.

    Nemotron-Nano at TP1: 2,134,016 bytes of state, 512 a token, kernel blocks of 32: 4,192 tokens (vllm#49612).
    """
    step = max(kernel, block)
    least = step * -(-state // (step * token))
    return max(block, -(-least // kernel) * kernel)


def token_bytes(layers: Sequence[Layer], tp: int, dtype: str) -> int:
    """Of one attention layer on one rank.

    Raises:
        ConfigError: TP does not fit the heads.
    """
    layer = next(one for one in layers if isinstance(one, AttentionLayer))
    heads = sum(span.count for span in attention_spans(layer.kv_heads, tp, 0))
    return heads * 2 * layer.head_size * DTYPE_BYTES[dtype]


def state_bytes(layers: Sequence[Layer], tp: int, dtype: str) -> int:
    """Of the longest state on one rank; raises ConfigError where TP does not fit its heads."""
    states = [layer for layer in layers if isinstance(layer, StateLayer)]
    return max(sum(local_shape(one, tp, 0)[2] for one in layer.tensors(None, dtype)) for layer in states)


def _one(name: str, field: str, sizes: tuple[int, ...] | None) -> int | None:
    if sizes is not None and len(sizes) > 1:
        raise ConfigError(f"--{name}: {field} lists {len(sizes)} groups; with --model give one size, as to vLLM")
    return sizes[0] if sizes else None


def _cache_dtype(model: ModelConfig, sides: Sides) -> str:
    named = {name: wish.dtype or model.dtype for name, wish in sides.items()}
    if len(set(named.values())) > 1:
        told = ", ".join(f"--{name} {dtype}" for name, dtype in named.items())
        raise ConfigError(f"KV cache dtypes differ ({told}), which no pair of engines agrees on; give both the same")
    return named["prefill"]


def _check_stages(model: ModelConfig, layers: Sequence[Layer], sides: Sides) -> None:
    """A case cuts its list of caches; that is vLLM's cut only where each hidden layer has one."""
    for name, wish in sides.items():
        if (wish.pp or 1) > 1 and len(layers) != len(model.layers):
            raise ConfigError(
                f"--{name} pp={wish.pp}: each of the {len(model.layers)} layers of this {model.family} model has "
                f"several caches ({len(layers)} in all), which pipeline stages of a case do not keep together; use pp=1"
            )


def _plain(layer: Layer) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(layer)
    return found


def _assumptions(model: ModelConfig, layers: Sequence[Layer], dtype: str) -> Iterator[str]:
    kinds = {kind: sum(layer.kind == kind for layer in layers) for kind in dict.fromkeys(one.kind for one in layers)}
    groups = 1 + max(layer.group for layer in layers)
    told = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    yield f"{model.family}: {told} caches in {groups} KV cache group(s), {dtype}; no draft model"
    states = [layer for layer in layers if isinstance(layer, StateLayer)]
    if states:
        yield (
            f"states in {states[0].state_dtype} (--mamba-ssm-cache-dtype auto; on CPU vLLM takes float32), convolutions "
            "in DS order (VLLM_SSM_CONV_STATE_LAYOUT), one state a block as in mamba_cache_mode align"
        )
