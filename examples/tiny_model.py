"""A seeded tiny dense Qwen3 with random weights, small enough for two engines on two CPU cores.

Random weights are enough to tell right KV from wrong: the query norm is scaled up so that attention
is sharp and every answer depends on which key and value stood where. The weights are saved by
`transformers`, because vLLM's dummy loader gives every tensor-parallel rank unlike shards.

    python examples/tiny_model.py build/models/tiny-qwen3
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

END_OF_TEXT = "<end>"
SPECIAL_IDS = {END_OF_TEXT: 0}
"""The trainer numbers special tokens first, in their order."""


@dataclasses.dataclass(frozen=True)
class TinyModel:
    """Sizes of the model; `key` names the cache folder, so a changed size is a new model."""

    layers: int = 4
    hidden_size: int = 128
    query_heads: int = 8
    kv_heads: int = 4
    head_size: int = 32
    vocabulary: int = 512
    max_tokens: int = 65_536
    query_gain: float = 3.0
    seed: int = 20_261_201

    @property
    def key(self) -> str:
        """Eight hex digits that stand for all sizes."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers and heads in float32, all ranks of an engine together."""
        return self.layers * 2 * self.kv_heads * self.head_size * 4


def save_tokenizer(folder: Path, vocabulary: int) -> int:
    """Train a byte-level tokenizer in a moment and return the id of its end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415 - slow import
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - slow import

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_IDS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT).save_pretrained(folder)
    return SPECIAL_IDS[END_OF_TEXT]


def save_weights(folder: Path, sizes: TinyModel, end_token: int) -> None:
    """Draw the weights from `sizes.seed` and save them as float32."""
    import torch  # noqa: PLC0415 - slow import
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415 - slow import
    from transformers.utils import logging  # noqa: PLC0415 - slow import

    logging.disable_progress_bar()
    config = Qwen3Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden_size,
        intermediate_size=2 * sizes.hidden_size,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.query_heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_size,
        max_position_embeddings=sizes.max_tokens,
        initializer_range=0.1,
        tie_word_embeddings=False,
        eos_token_id=end_token,
        bos_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(sizes.seed)
    model = Qwen3ForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(sizes.query_gain)
    model.save_pretrained(folder)


def built_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`; where it is missing, `build` fills a draft beside it first, so that it is never half there."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        build(draft)
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # another process may have been faster
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def ensure_tiny_model(models: Path, sizes: TinyModel | None = None) -> Path:
    """Return the model's folder under `models`; build it there if it is not complete yet."""
    made = sizes or TinyModel()

    def build(draft: Path) -> None:
        save_weights(draft, made, save_tokenizer(draft, made.vocabulary))

    return built_once(models / f"tiny-qwen3-{made.key}", build)


if __name__ == "__main__":
    print(ensure_tiny_model(Path(sys.argv[1] if len(sys.argv) > 1 else "build/models")))
