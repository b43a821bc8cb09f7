"""Registry of architectures: the only place that knows them all. Adding one is a file and a line here."""

from __future__ import annotations

from ..files.gguf import GGUFFile
from .gemma3 import Gemma3
from .gemma4 import Gemma4
from .gpt_oss import GptOss
from .laguna import Laguna
from .llama import Llama
from .qwen3 import Qwen3
from .qwen3moe import Qwen3Moe
from .qwen3next import Qwen3Next
from .qwen35 import Qwen35
from .qwen35moe import Qwen35Moe
from .target import Target

TARGETS: dict[str, type[Target]] = {
    "qwen35": Qwen35,
    "qwen35moe": Qwen35Moe,
    "qwen3next": Qwen3Next,
    "qwen3": Qwen3,
    "qwen3moe": Qwen3Moe,
    "laguna": Laguna,
    "llama": Llama,
    "gpt-oss": GptOss,
    "gemma3": Gemma3,
    "gemma4": Gemma4,
}

# name parts of architectures that are often passed by mistake, with advice
_OTHERS = (
    ("clip", "this is the vision part of a model (mmproj), name the model's own file"),
    ("dflash", "this is a draft, name it with -md and its target with -m"),
    ("eagle", "this is a draft, of a kind that is not supported"),
    ("gptoss", "Ollama's own form of gpt-oss is not supported, take a GGUF file of architecture 'gpt-oss'"),
    ("assistant", "this is a draft, of a kind that is not supported"),
    ("gemma", "of the Gemma models Gemma 3 and 4 are supported"),
    ("qwen", "of the Qwen models Qwen3, Qwen3-Next and those from 3.5 on are supported"),
)

_ROTATED = "prism.hadamard."  # without that rotation of activations the logits are noise


def read_target(file: GGUFFile) -> Target:
    """The target in an open file.

    Raises:
        ModelFileError: The architecture is unknown, or the file does not match it.
    """
    target = TARGETS.get(file.arch)
    if target is None:
        known = ", ".join(repr(name) for name in TARGETS)
        what = next((f"; {what}" for part, what in _OTHERS if part in file.arch), "")
        raise file.error(
            f"key 'general.architecture': {file.arch!r} is not a target (expected {known}){what}"
        )
    if rotated := next((key for key in file.metadata if key.startswith(_ROTATED)), None):
        raise file.error(
            f"key {rotated!r}: weights in a rotated basis, as Bonsai 2 has them, are not supported"
        )
    return target.from_gguf(file)
