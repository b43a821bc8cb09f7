"""Dialects of published DFlash drafts, normalised to one form: parameters and tensor names.

checkpoint  safetensors + config.json, see `checkpoint`
lucebox     GGUF of Lucebox and spiritbuun, architecture `*dflash-draft`
upstream    GGUF of llama.cpp, architecture `dflash`, also of DFlash2 and DSpark; a tap is named by the layer that it enters, so
            one higher
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ...files.gguf import GGUFFile, StringArray
from ...files.keys import KeyedFile
from ...files.pairs import replacement
from ...files.safetensors import SafetensorsFile
from ...models.checks import MAX_HEADS, MAX_LAYERS, in_range, positive
from ...models.rope import read_yarn
from ..dflash2 import SELECTOR, Selector, read_selector
from ..dspark import BEFORE, GATE, MAX_RANK, TO_TARGET, Markov
from .checkpoint import read_checkpoint
from .fields import DEFAULT_BLOCK, Dialect, count, plain_only, unique

LUCEBOX_ARCHS = ("qwen35-dflash-draft", "dflash-draft", "gemma4-dflash-draft")

_LUCEBOX_GLOBAL = {
    "dflash.fc.weight": "fc.weight",
    "dflash_fc.weight": "fc.weight",
    "dflash.hidden_norm.weight": "enc.output_norm.weight",
    "dflash_hidden_norm.weight": "enc.output_norm.weight",
}
# Name parts that identify other kinds of draft, in any dialect: of tensors, of keys, and of architectures.


def read_dialect(file: GGUFFile | SafetensorsFile) -> Dialect:
    """Recognise the dialect of an open file and read it.

    Raises:
        ModelFileError: A key is missing or wrong; it names it.
    """
    _refuse_eagle(file)
    if isinstance(file, SafetensorsFile):
        return read_checkpoint(file)
    if file.arch == "dflash":
        return _upstream(file)
    if file.arch in LUCEBOX_ARCHS:
        return _lucebox(file)
    known = ", ".join(("dflash", *LUCEBOX_ARCHS))
    what = (
        "this is the vision part of a model (mmproj)" if file.arch == "clip" else "a target is named with -m"
    )
    raise file.error(
        f"key 'general.architecture': {file.arch!r} is not a draft (expected one of {known}); {what}"
    )


def _refuse_eagle(file: GGUFFile | SafetensorsFile) -> None:
    listed = file.metadata.get("architectures")
    archs = [file.metadata.get("general.architecture"), *(listed if isinstance(listed, list) else ())]
    for what, names, pattern in (
        ("tensor", file.tensors, r"attn_norm_2|midlayer"),
        ("key", file.metadata, r"norm_before_(residual|fc)"),
        ("architecture", archs, r"eagle"),
    ):
        found = next((n for n in names if isinstance(n, str) and re.search(pattern, n, re.IGNORECASE)), None)
        if found:
            raise file.error(
                f"an EAGLE-3 draft, by its {what} {found!r}; only DFlash, DFlash2 and DSpark drafts are supported: "
                f"{instead(file)}"
            )


def title(file: KeyedFile) -> str:
    """The draft's name in its metadata, or empty."""
    name = file.metadata.get("general.name")
    return name if isinstance(name, str) else ""


def instead(file: KeyedFile) -> str:
    """Advice on what to use instead of an unsupported draft."""
    return replacement(file.path.name, title(file), file.path.parent.name)


def _upstream(file: GGUFFile) -> Dialect:
    early = file.get_array("dflash.target_layer_ids", int)  # keys from before llama.cpp's names were final
    if early is not None and "dflash.target_layers" not in file.metadata:
        taps = tuple(early)
    else:
        inputs = file.require_array("dflash.target_layers", int)
        if not all(i >= 1 for i in inputs):
            raise file.error(
                f"key 'dflash.target_layers': {list(inputs)} should be layer ids + 1, so 1 or more"
            )
        taps = tuple(i - 1 for i in inputs)
    fields = _gguf_fields(file, "dflash") | {
        "block_size": file.get("dflash.block_size", int, DEFAULT_BLOCK),
        "mask_id": file.require(file.first_of("tokenizer.ggml.mask_token_id", "dflash.mask_token_id"), int),
        "taps": taps,
        "n_draft_vocab": file.tensors[TO_TARGET].shape[-1] if TO_TARGET in file.tensors else None,
        "selector": _selector(file),
        "markov": _markov(file),
    }
    return Dialect(fields, {name: name for name in file.tensors})


def _selector(file: GGUFFile) -> Selector | None:
    keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    if SELECTOR not in file.tensors and not any(f"dflash.{key}" in file.metadata for key in keys):
        return None
    return read_selector(file, "dflash.", "dflash.logit_scale", "dflash.final_logit_softcapping")


def _markov(file: GGUFFile) -> Markov | None:
    if BEFORE not in file.tensors:
        if "dflash.has_confidence_head" in file.metadata:
            raise file.error(
                f"tensor {BEFORE!r} is missing, but key 'dflash.has_confidence_head' indicates a DSpark draft"
            )
        return None
    rank = in_range(file.error, "rank of the Markov head", file.tensors[BEFORE].shape[0], 1, MAX_RANK)
    anchor = file.get("dflash.sample_from_anchor", bool, True)
    return Markov(rank, GATE in file.tensors, bool(anchor))


def _lucebox(file: GGUFFile) -> Dialect:
    arch = file.arch
    if f"{arch}.dflash.target_layer_ids" not in file.metadata:
        raise file.error(
            f"key '{arch}.dflash.target_layer_ids' is missing, as in files of Lucebox's early converters, which also "
            f"wrote a wrong rope base: {instead(file)}"
        )
    fields = _gguf_fields(file, arch) | {
        "block_size": file.get(f"{arch}.dflash.block_size", int, DEFAULT_BLOCK),
        "mask_id": file.require(f"{arch}.dflash.mask_token_id", int),
        "taps": tuple(file.require_array(f"{arch}.dflash.target_layer_ids", int)),
    }
    # In this dialect `post_attention_norm` is the norm before the FFN; in upstream files it is an additional norm.
    norm = re.compile(r"^(blk\.\d+)\.post_attention_norm\.")
    names = ((_LUCEBOX_GLOBAL.get(name, norm.sub(r"\1.ffn_norm.", name)), name) for name in file.tensors)
    return Dialect(fields, unique(file, names))


def _gguf_fields(file: GGUFFile, arch: str) -> dict[str, Any]:
    """The fields with the same names below `arch` in both GGUF dialects."""
    head_dim = count(file, f"{arch}.attention.key_length")
    plain_only(
        file,
        {
            f"{arch}.attention.value_length": head_dim,
            f"{arch}.hidden_activation": "silu",
            f"{arch}.embedding_scale": 1.0,
            f"{arch}.attention.value_scale": 1.0,
        },
    )
    n_layers = count(file, f"{arch}.block_count", MAX_LAYERS)
    n_rot = file.get(f"{arch}.rope.dimension_count", int)
    window = file.get(f"{arch}.attention.sliding_window", int) or None
    layers: Sequence[bool] = (False,) * n_layers
    if window:
        layers = file.require_array(f"{arch}.attention.sliding_window_pattern", bool)
    theta, eps = f"{arch}.rope.freq_base", f"{arch}.attention.layer_norm_rms_epsilon"
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    n_tokens = len(tokens) if isinstance(tokens, StringArray) else None
    return {
        "n_layers": n_layers,
        "n_embd": count(file, f"{arch}.embedding_length"),
        "n_ff": count(file, f"{arch}.feed_forward_length"),
        "n_heads": count(file, f"{arch}.attention.head_count", MAX_HEADS),
        "n_kv_heads": count(file, f"{arch}.attention.head_count_kv", MAX_HEADS),
        "head_dim": head_dim,
        "rope_theta": positive(file.error, f"key {theta!r}", file.require(theta, float)),
        "rms_eps": positive(file.error, f"key {eps!r}", file.require(eps, float)),
        "n_vocab": file.get(f"{arch}.vocab_size", int, n_tokens),
        "sliding_window": window,
        "window_layers": tuple(layers),
        "declared_causal": file.get(f"{arch}.attention.causal", bool),
        "n_rot": None if n_rot in (None, head_dim) else n_rot,
        "yarn": read_yarn(file, f"{arch}.rope.scaling."),
    }
