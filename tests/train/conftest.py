"""Fixtures of a toy target as a GGUF file and, of the same weights, as a transformers checkpoint. Needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from reference import toys

N_VOCAB = 300


@dataclass(frozen=True, slots=True)
class Twins:
    gguf: Path
    folder: Path


@pytest.fixture(scope="session")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    """The toy target twice; its tokenizer has a token per byte, and a mask token."""
    base = tmp_path_factory.mktemp("twins")
    gguf, _ = toys.write_pair(base, 7, n_vocab=N_VOCAB, draft_tokens=True)
    write_checkpoint(gguf, base / "target")
    return Twins(gguf, base / "target")


@pytest.fixture(scope="session")
def demo_checkpoint(demo_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target as a transformers checkpoint, of the numbers that its Q8_0 file holds."""
    folder = tmp_path_factory.mktemp("demo") / "target"
    write_checkpoint(demo_target, folder)
    return folder


def write_checkpoint(gguf: Path, folder: Path) -> None:
    """A `qwen35` file as a folder that transformers opens, with a tokenizer of single bytes and a mask token."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from fixtures import hf_layout

    weights = hf_layout.read(gguf)
    config = transformers.Qwen3_5TextConfig(**hf_layout.target_config(weights))
    model = transformers.Qwen3_5ForCausalLM._from_config(config, dtype=torch.float32)
    state = hf_layout.target_state_dict(weights)
    model.load_state_dict({name: torch.from_numpy(x) for name, x in state.items()})
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|mask|>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a few short texts."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    for i in range(6):
        words = rng.choice(["for", "while", "in", "x", "return", "(", ")", ":\n"], 300)
        (folder / f"{i}.txt").write_text(" ".join(words))
    return folder
