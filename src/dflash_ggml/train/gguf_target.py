"""A target's GGUF file as a frozen torch model: dense `llama` and `qwen3` architectures.

Its matrices are the dequantised weights, so that a draft learns from the model that it will run with. B rows, T tokens, D width,
H heads of size d.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError, ModelFileError
from .block_net import Tables
from .recipe import TargetSizes
from .target import TargetModel

ARCHITECTURES = ("llama", "qwen3")
_PARTS = [
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
]
_OPTIONAL = ["attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_q_norm.weight", "attn_k_norm.weight"]
_CONTROL = 3  # a token's type


class Cache:
    """Keys and values [2, B, H, length, d] of each layer for rows at one position, of which `used` are written."""

    def __init__(self, layers: int, shape: Sequence[int], like: Tensor) -> None:
        self.layers = [like.new_empty((2, *shape)) for _ in range(layers)]
        self.used = 0


class GGUFTarget(TargetModel):
    """The model of a GGUF file.

    Raises:
        ModelFileError: It has another architecture, or unsupported features.
    """

    def __init__(self, path: Path, device: str, dtype: torch.dtype) -> None:
        try:
            from gguf import GGUFReader
            from gguf.quants import dequantize
        except ImportError:
            raise ConfigError("the package gguf is missing: pip install 'dflash-ggml[train]'") from None
        try:
            reader = GGUFReader(path)
        except (OSError, ValueError, IndexError) as reason:  # the last: a file that ends early
            raise ModelFileError(f"{path}: {reason}") from None
        self.path, self.device = path, device
        self.keys = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        arch = self._key("general.architecture")
        if arch not in ARCHITECTURES:
            known = " or ".join(ARCHITECTURES)
            raise ModelFileError(
                f"{path}: a GGUF file of {arch!r} cannot be trained for ({known} can); give the transformers checkpoint"
            )
        weights: dict[str, Tensor] = {}
        for t in reader.tensors:
            shape = [int(n) for n in reversed(t.shape)]
            x = torch.from_numpy(dequantize(t.data, t.tensor_type).reshape(shape).astype("float32"))
            weights[t.name] = x.to(device, dtype if len(shape) > 1 else torch.float32)
        self._read_sizes(arch, weights)
        self._read_weights(weights, arch)

    def _key(self, name: str, default: Any = None) -> Any:
        """A key's value. Raises ModelFileError if it is missing without default."""
        field = self.keys.get(name)
        if field is None and default is None:
            raise ModelFileError(f"{self.path}: key {name!r} is missing")
        return default if field is None else field.contents()

    def _read_sizes(self, arch: str, weights: Mapping[str, Tensor]) -> None:
        def key(name: str, default: Any = None) -> Any:
            return self._key(f"{arch}.{name}", default)

        d, heads = int(key("embedding_length")), int(key("attention.head_count"))
        self.n_heads, self.n_kv_heads = heads, int(key("attention.head_count_kv", heads))
        self.head_dim = int(key("attention.key_length", d // heads))
        for name, plain in (
            ("expert_count", 0),
            ("rope.scaling.type", "none"),
            ("attention.sliding_window", 0),
        ):
            if key(name, plain) != plain:
                raise ModelFileError(
                    f"{self.path}: key '{arch}.{name}' is {key(name)!r}; give the transformers checkpoint instead"
                )
        if int(key("rope.dimension_count", self.head_dim)) != self.head_dim or "rope_freqs.weight" in weights:
            raise ModelFileError(
                f"{self.path}: partial or scaled rotary positions are not supported; give the transformers checkpoint instead"
            )
        self.sizes = TargetSizes(
            n_layers=int(key("block_count")),
            n_embd=d,
            n_ff=int(key("feed_forward_length")),
            n_vocab=len(weights["token_embd.weight"]),
            rope_theta=float(key("rope.freq_base", 10000.0)),
            rms_eps=float(key("attention.layer_norm_rms_epsilon")),
            n_ctx=int(key("context_length")),
            eos=int(self._key("tokenizer.ggml.eos_token_id")),
        )

    def _read_weights(self, weights: dict[str, Tensor], arch: str) -> None:
        embedding = weights.pop("token_embd.weight")
        self.tables = Tables(embedding, weights.pop("output.weight", embedding))
        self.adjacent = arch == "llama"  # rotary pairs of a head
        try:
            self.norm = weights.pop("output_norm.weight")
            self.blocks = [
                {part: weights.pop(f"blk.{i}.{part}.weight") for part in _PARTS}
                | {part: weights.pop(f"blk.{i}.{part}", None) for part in _OPTIONAL}
                for i in range(self.sizes.n_layers)
            ]
        except KeyError as name:
            raise ModelFileError(f"{self.path}: tensor {name} is missing") from None
        if weights:
            raise ModelFileError(
                f"{self.path}: tensor {next(iter(weights))!r} is none of this architecture's; give the transformers checkpoint"
            )

    @cached_property
    def tokenizer(self) -> Any:
        """The file's tokenizer."""
        from ..files.gguf import GGUFFile
        from ..text.tokenizer import Tokenizer

        with GGUFFile(self.path) as file:
            return Tokenizer.from_gguf(file)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts, no special ones added."""
        return [self.tokenizer.encode(text) for text in texts]

    def render(self, messages: list[dict[str, Any]], answer: bool) -> str:
        """Messages in the chat format."""
        from ..text.template import ChatTemplate, normalise_messages

        def text(token: int | None) -> str:
            return "" if token is None else self.tokenizer.decode([token], special=True)

        tokens = self.tokenizer
        template = ChatTemplate(
            self._key("tokenizer.chat_template"), bos_token=text(tokens.bos_id), eos_token=text(tokens.eos_id)
        )
        return template.render(normalise_messages(messages), add_generation_prompt=answer)

    @property
    def has_template(self) -> bool:
        """Whether the file has a chat template."""
        return "tokenizer.chat_template" in self.keys

    def mask_id(self) -> int:
        """A token for masked columns that does not occur in texts: the last control token not named by a key or the template."""
        tokens, kinds = self._key("tokenizer.ggml.tokens"), self._key("tokenizer.ggml.token_type")
        template = self._key("tokenizer.chat_template", "-")
        named = {self._key(name) for name in self.keys if name.endswith("_token_id")}
        unused = [
            i
            for i, (token, kind) in enumerate(zip(tokens, kinds))
            if kind == _CONTROL and i not in named and token not in template
        ]
        if not unused:
            raise ConfigError(
                f"{self.path}: no token is left for the mask; --mask-id names one that texts do not have"
            )
        return next((i for i in unused if "mask" in tokens[i].lower()), unused[-1])

    @torch.no_grad()
    def features(self, ids: Tensor, taps: Sequence[int]) -> Tensor:
        """See `TargetModel.features`."""
        last, found = self._layers(ids, None, taps)
        return torch.cat([found[i] for i in taps], -1) if taps else self._normed(last, self.norm)

    def step(self, ids: Tensor, cache: Any, length: int) -> tuple[Tensor, Any]:
        """See `TargetModel.step`."""
        if cache is None:
            shape = len(ids), self.n_kv_heads, length, self.head_dim
            cache = Cache(self.sizes.n_layers, shape, self.tables.embedding)
        last, _ = self._layers(ids, cache, ())
        return F.linear(self._normed(last[:, -1], self.norm), self.tables.head), cache

    def _layers(
        self, ids: Tensor, cache: Cache | None, taps: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The last layer's output [B, T, D], and those of tapped layers."""
        used = 0 if cache is None else cache.used
        x = F.embedding(ids, self.tables.embedding)
        angles = self._angles(used, ids.shape[1])
        found = {}
        for i, w in enumerate(self.blocks):
            kept = None if cache is None else cache.layers[i]
            x = x + self._attention(self._normed(x, w["attn_norm"]), w, angles, kept, used)
            y = self._normed(x, w["ffn_norm"])
            x = x + F.linear(F.silu(F.linear(y, w["ffn_gate"])) * F.linear(y, w["ffn_up"]), w["ffn_down"])
            if i in taps:
                found[i] = x
        if cache is not None:
            cache.used += ids.shape[1]
        return x, found

    def _attention(
        self, y: Tensor, w: Mapping[str, Any], angles: tuple[Tensor, Tensor], kept: Tensor | None, used: int
    ) -> Tensor:
        def heads(part: str, n: int) -> Tensor:
            bias = w[f"{part}.bias"]
            z = F.linear(y, w[part], None if bias is None else bias.to(y.dtype)).unflatten(
                -1, (n, self.head_dim)
            )
            norm = w.get(f"{part}_norm.weight")
            return (z if norm is None else self._normed(z, norm)).transpose(1, 2)

        q = self._turned(heads("attn_q", self.n_heads), angles)
        k, v = self._turned(heads("attn_k", self.n_kv_heads), angles), heads("attn_v", self.n_kv_heads)
        if kept is not None:
            end = used + y.shape[1]
            kept[0, :, :, used:end], kept[1, :, :, used:end] = k, v
            k, v = kept[0, :, :, :end], kept[1, :, :, :end]
        o = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)
        return F.linear(o.transpose(1, 2).flatten(2), w["attn_output"])

    def _angles(self, first: int, n: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [n, d / 2]."""
        d, device = self.head_dim, self.device
        frequency = self.sizes.rope_theta ** (-torch.arange(0, d, 2, device=device).float() / d)
        angle = torch.arange(first, first + n, device=device).float()[:, None] * frequency
        return angle.cos(), angle.sin()

    def _turned(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = angles
        y = x.float()
        a, b = (y[..., 0::2], y[..., 1::2]) if self.adjacent else y.chunk(2, -1)
        pair = a * cos - b * sin, b * cos + a * sin
        turned = torch.stack(pair, -1).flatten(-2) if self.adjacent else torch.cat(pair, -1)
        return turned.type_as(x)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight, self.sizes.rms_eps).type_as(x)


def open_target(path: Path, device: str, dtype: torch.dtype) -> TargetModel:
    """The target of a GGUF file, or of a folder with a transformers checkpoint.

    Raises:
        ModelFileError: It cannot be read, or is unsupported for training.
        ConfigError: A package is missing.
    """
    return (GGUFTarget if path.suffix == ".gguf" else TargetModel)(path, device, dtype)
