"""Hyper-parameters of a block draft, independent of its dialect, and the check that they fit a target."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from ...errors import ModelFileError
from ...files.gguf import GGUFFile
from ...files.pairs import ModelName, find_pair
from ...files.safetensors import SafetensorsFile
from ...ggml.operations import Yarn
from ...models.checks import in_range
from ...models.feed_forward import Dense
from ...models.target import Target
from ...models.tensors import attention_tensors
from ..dflash2 import Selector
from ..dspark import TO_TARGET, Markov

OWN_TABLES = EMBEDDING, HEAD = "token_embd.weight", "output.weight"
MASK = "mask_embedding"  # the mask token's separate vector
TAP_NORMS, OUTPUT_GATE = "enc.aux_norm.weight", "attn_gate"
MAX_BLOCK, MAX_TAPS, MAX_WINDOW = 256, 256, 1 << 30


@dataclass(frozen=True, slots=True)
class DraftParams:
    """Sizes and attention rules of a block draft: plain DFlash, or with a `selector` DFlash2, with a `markov` head DSpark."""

    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    block_size: int  # rows of the masked block, the pending token's included
    mask_id: int
    taps: tuple[int, ...]  # target layers, from 0, whose output feeds the draft; ascending
    n_vocab: int | None  # if the file has it
    sliding_window: int | None  # tokens that a row of a window layer sees, itself included
    window_layers: tuple[bool, ...]  # [n_layers]
    declared_causal: bool | None  # the file's causality inside the block, if any
    own: tuple[str, ...] = ()  # those of OWN_TABLES that the draft has itself; others are the target's
    n_rot: int | None = None  # rotated leading dimensions of a head, None: all
    yarn: Yarn | None = None
    has_mask_vector: bool = False
    n_draft_vocab: int | None = None  # size of a reduced vocabulary
    # each tap has its own norm, and the layers' input norms apply to the context too
    normed_taps: bool = False
    gated: bool = False  # attention's output has a softplus gate per head
    selector: Selector | None = None
    markov: Markov | None = None

    @property
    def first_row(self) -> int:
        """The first drafting column of a block: 0 if the pending token's column drafts."""
        return 0 if self.markov is not None and self.markov.from_anchor else 1

    @property
    def depth(self) -> int:
        """Tokens that a whole block drafts."""
        return self.block_size - self.first_row

    @property
    def causal_full(self) -> bool:
        """Whether a row of the block sees only earlier rows, in full-attention layers: as declared, by default not."""
        return self.declared_causal is True

    @property
    def causal_window(self) -> bool:
        """The same in sliding-window layers: as declared, by default yes, as in most engines."""
        return self.declared_causal is not False

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Normalised name -> shape (ggml order) of every tensor that the graph uses."""
        d = self.n_embd
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (len(self.taps) * d, d),
            "enc.output_norm.weight": (d,),
            "output_norm.weight": (d,),
        }
        if self.normed_taps:
            shapes[TAP_NORMS] = (d, len(self.taps))
        layer = attention_tensors(d, self.n_heads, self.n_kv_heads, self.head_dim)
        layer |= Dense(d, self.n_ff).tensors() | {"attn_norm.weight": (d,), "ffn_norm.weight": (d,)}
        if self.gated:
            layer[f"{OUTPUT_GATE}.weight"] = (d, self.n_heads)
        for i in range(self.n_layers):
            shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
        n_vocab = self.n_vocab or 0
        n_draft = self.n_draft_vocab or n_vocab
        shapes |= {name: (d, n_draft if name == HEAD else n_vocab) for name in self.own}
        if self.has_mask_vector:
            shapes[MASK] = (d,)
        if self.selector is not None:
            shapes |= self.selector.tensor_shapes(d, self.n_layers, n_vocab)
        if self.markov is not None:
            shapes |= self.markov.tensor_shapes(d, n_vocab, n_draft)
        return shapes


def with_window(p: DraftParams, window: int) -> DraftParams:
    """`p` with another window on its window layers, or, if it has none, on all layers but the last; 0: no windows."""
    if not window:
        return replace(p, sliding_window=None, window_layers=(False,) * p.n_layers)
    layers = p.window_layers if any(p.window_layers) else (*[True] * (p.n_layers - 1), False)
    return replace(p, sliding_window=window, window_layers=layers)


def window_note(target_name: str, draft_name: str, title: str, p: DraftParams) -> str:
    """A warning if the file has no windows although drafts of its model are trained with them; else empty."""
    pair = find_pair(Path(target_name).name, Path(draft_name).name, title)
    if pair is None or not pair.window or any(p.window_layers):
        return ""
    if ModelName.of(Path(draft_name).name, title).contradicts(ModelName(pair.family, pair.size)):
        return ""
    return (
        f"{draft_name} states no attention window, but the draft of {pair.name} was trained with one of {pair.window}: "
        f"long texts lose acceptance; --draft-window {pair.window} sets it (draft_window= in Python), 0 silences this"
    )


def mismatches(target: Target, draft: DraftParams) -> list[str]:
    """All reasons why a draft cannot serve a target; none for a pair that works."""
    found = []
    if draft.n_embd != target.n_embd:
        found.append(f"the draft's hidden size is {draft.n_embd}, the target's {target.n_embd}")
    if draft.n_vocab not in (None, target.n_vocab):
        found.append(f"the draft's vocabulary has {draft.n_vocab} tokens, the target's {target.n_vocab}")
    if draft.taps[-1] >= target.n_layers:
        found.append(f"the draft taps layer {draft.taps[-1]}, the target's last one is {target.n_layers - 1}")
    if draft.mask_id >= target.n_vocab and not draft.has_mask_vector:
        found.append(f"the mask token id {draft.mask_id} is outside the target's {target.n_vocab} tokens")
    return found


def check_pair(target: Target, draft: DraftParams, target_name: str, draft_name: str) -> list[str]:
    """Warnings for a pair that may work badly; `ModelFileError`, naming both files and all reasons, if it cannot work."""
    if wrong := mismatches(target, draft):
        raise ModelFileError(
            f"{draft_name} does not fit {target_name}: {'; '.join(wrong)}; use the draft made for it"
        )
    if math.isclose(draft.rope_theta, target.rope_theta, rel_tol=1e-6):  # GGUF stores it as f32
        return []
    bases = f"{draft_name} has rope base {draft.rope_theta:g}, {target_name} has {target.rope_theta:g}"
    return [
        f"{bases}; some converters wrote a wrong one: if acceptance is low, take a file of another converter"
    ]


def check_params(source: GGUFFile | SafetensorsFile, p: DraftParams) -> None:
    """Check ranges of the fields and their relations."""
    taps, error = p.taps, source.error
    in_range(error, "block size", p.block_size, 2, MAX_BLOCK)
    in_range(error, "mask token id", p.mask_id, 0, (1 << 31) - 1)
    in_range(error, "number of tapped layers", len(taps), 1, MAX_TAPS)
    if taps[0] < 0 or any(a >= b for a, b in pairwise(taps)):
        raise error(f"tapped layers {list(taps)} should ascend from 0 or more")
    if p.n_heads % p.n_kv_heads or p.head_dim % 2:
        raise error(f"{p.n_heads} heads of {p.head_dim} do not divide over {p.n_kv_heads} key/value heads")
    if p.sliding_window is not None:
        in_range(error, "sliding window", p.sliding_window, 1, MAX_WINDOW)
    if p.n_rot is not None and p.n_rot not in range(2, p.head_dim + 1, 2):
        raise error(f"{p.n_rot} rotated dimensions should be even and within a head of {p.head_dim}")
    if p.selector is not None:
        if p.n_embd % p.selector.group:
            raise error(
                f"convolution groups of {p.selector.group} channels do not divide the hidden size {p.n_embd}"
            )
        if p.n_draft_vocab is not None:
            raise error(
                f"tensor {TO_TARGET!r}: a DFlash2 draft with a vocabulary of its own is not supported"
            )
    if len(p.window_layers) != p.n_layers:
        raise error(
            f"the pattern of sliding windows has {len(p.window_layers)} entries for {p.n_layers} layers"
        )
