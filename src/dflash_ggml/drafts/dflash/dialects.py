"""The three ways in which DFlash drafts are published, brought to one form: parameters and tensor names.

z-lab      safetensors + config.json
lucebox    GGUF of Lucebox and spiritbuun, architecture `*dflash-draft`
upstream   GGUF of llama.cpp, architecture `dflash`; a tap is named by the layer that it enters, so one higher
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ...files.gguf import GGUFFile, StringArray
from ...files.keys import KeyedFile, describe
from ...files.pairs import replacement
from ...files.safetensors import SafetensorsFile
from ...models.checks import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, in_range, positive

T = TypeVar("T", int, float, bool, str)

LUCEBOX_ARCHS = ("qwen35-dflash-draft", "dflash-draft", "gemma4-dflash-draft")
DEFAULT_BLOCK = 16  # the formats' own meaning of a missing block size

_ZLAB_GLOBAL = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
}
_ZLAB_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LUCEBOX_GLOBAL = {
    "dflash.fc.weight": "fc.weight",
    "dflash_fc.weight": "fc.weight",
    "dflash.hidden_norm.weight": "enc.output_norm.weight",
    "dflash_hidden_norm.weight": "enc.output_norm.weight",
}
# Parts of names that only other kinds of draft have, in any dialect: of tensors, of keys, and of architectures.
_OTHER_KINDS = {
    "a DFlash2 draft (dynamic convolutions, candidate selector)": (
        r"selector|(attn|ffn|attention|mlp)_conv",
        r"selector_|conv_(kernel|group)_size",
        r"dflash2",
    ),
    "a DSpark draft (Markov and confidence heads)": (
        r"markov|confidence_head|conf_proj|\bd2t\b",
        r"markov|confidence|sample_from_anchor",
        r"dspark",
    ),
    "an EAGLE-3 draft": (r"attn_norm_2|midlayer", r"norm_before_(residual|fc)", r"eagle"),
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """A draft as its file declares it.

    `fields` are arguments of `DraftParams`; `names` maps normalised tensor names to those in the file;
    `interleaved`: the two members of a rotary pair are neighbours and must be brought half a head apart.
    """

    fields: dict[str, Any]
    names: dict[str, str]
    interleaved: bool = False


def read_dialect(file: GGUFFile | SafetensorsFile) -> Dialect:
    """Recognise the dialect of an open file and read it. Raises `ModelFileError` naming the key at fault."""
    _refuse_other_kinds(file)
    if isinstance(file, SafetensorsFile):
        return _zlab(file)
    if file.arch == "dflash":
        return _upstream(file)
    if file.arch in LUCEBOX_ARCHS:
        return _lucebox(file)
    known = ", ".join(("dflash", *LUCEBOX_ARCHS))
    what = (
        "this is the vision part of a model (mmproj)" if file.arch == "clip" else "a target is named with -m"
    )
    raise file.error(
        f"key 'general.architecture': {file.arch!r} is no draft (expected one of {known}); {what}"
    )


def _refuse_other_kinds(file: GGUFFile | SafetensorsFile) -> None:
    listed = file.metadata.get("architectures")
    archs = [file.metadata.get("general.architecture"), *(listed if isinstance(listed, list) else ())]
    for kind, patterns in _OTHER_KINDS.items():
        for what, names, pattern in zip(
            ("tensor", "key", "architecture"), (file.tensors, file.metadata, archs), patterns, strict=True
        ):
            found = next(
                (n for n in names if isinstance(n, str) and re.search(pattern, n, re.IGNORECASE)), None
            )
            if found:
                raise file.error(
                    f"{kind}, by its {what} {found!r}; only plain DFlash drafts are supported: {instead(file)}"
                )


def title(file: KeyedFile) -> str:
    """What a draft calls itself; empty if it does not."""
    name = file.metadata.get("general.name")
    return name if isinstance(name, str) else ""


def instead(file: KeyedFile) -> str:
    """What to use instead of a draft that cannot be used."""
    return replacement(file.path.name, title(file), file.path.parent.name)


def _upstream(file: GGUFFile) -> Dialect:
    early = file.get_array("dflash.target_layer_ids", int)  # as written before llama.cpp settled its names
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
        "block_size": _optional(file, "dflash.block_size", int, DEFAULT_BLOCK),
        "mask_id": file.require(file.first_of("tokenizer.ggml.mask_token_id", "dflash.mask_token_id"), int),
        "taps": taps,
    }
    return Dialect(fields, {name: name for name in file.tensors})


def _lucebox(file: GGUFFile) -> Dialect:
    arch = file.arch
    if f"{arch}.dflash.target_layer_ids" not in file.metadata:
        raise file.error(
            f"key '{arch}.dflash.target_layer_ids' is missing, as in files of Lucebox's early converters, which also "
            f"wrote a wrong rope base: {instead(file)}"
        )
    fields = _gguf_fields(file, arch) | {
        "block_size": _optional(file, f"{arch}.dflash.block_size", int, DEFAULT_BLOCK),
        "mask_id": file.require(f"{arch}.dflash.mask_token_id", int),
        "taps": tuple(file.require_array(f"{arch}.dflash.target_layer_ids", int)),
    }
    # Here `post_attention_norm` is the norm before the FFN; in upstream files it would be an extra one.
    norm = re.compile(r"^(blk\.\d+)\.post_attention_norm\.")
    names = ((_LUCEBOX_GLOBAL.get(name, norm.sub(r"\1.ffn_norm.", name)), name) for name in file.tensors)
    return Dialect(fields, _unique(file, names))


def _zlab(file: SafetensorsFile) -> Dialect:
    archs = file.get_array("architectures", str)
    if archs is not None and "DFlashDraftModel" not in archs:
        raise file.error(f"key 'architectures': {', '.join(archs)} is not supported, only DFlashDraftModel")
    nested = "rope_parameters"
    rope = file.first_of("rope_theta", f"{nested}.rope_theta", f"{nested}.full_attention.rope_theta")
    taps = file.first_of("dflash_config.target_layer_ids", "target_layer_ids")
    block = file.first_of("dflash_config.block_size", "block_size")
    n_layers = _count(file, "num_hidden_layers", MAX_LAYERS)
    n_embd, n_heads = _count(file, "hidden_size"), _count(file, "num_attention_heads", MAX_HEADS)
    head_dim = _count(file, "head_dim") if "head_dim" in file.metadata else n_embd // n_heads
    window, layers = _zlab_window(file, n_layers)
    causal = file.first_of("is_causal", "dflash_config.causal")
    _plain_only(
        file,
        {
            "hidden_act": "silu",
            "rope_scaling.rope_type": "default",
            "rope_scaling.type": "default",
            "rope_parameters.rope_type": "default",
            "rope_parameters.partial_rotary_factor": 1.0,
            "partial_rotary_factor": 1.0,
            "dflash_config.attention_value_scale": 1.0,
            "dflash_config.input_embedding_scale": 1.0,
            "input_embedding_scale": 1.0,
        },
    )
    fields = {
        "n_layers": n_layers,
        "n_embd": n_embd,
        "n_ff": _count(file, "intermediate_size"),
        "n_heads": n_heads,
        "n_kv_heads": _count(file, "num_key_value_heads", MAX_HEADS),
        "head_dim": head_dim,
        "rope_theta": positive(file.error, f"key {rope!r}", file.require(rope, float)),
        "rms_eps": positive(file.error, "key 'rms_norm_eps'", file.require("rms_norm_eps", float)),
        "block_size": _optional(file, block, int, DEFAULT_BLOCK),
        "mask_id": file.require(file.first_of("dflash_config.mask_token_id", "mask_token_id"), int),
        "taps": tuple(file.require_array(taps, int)),
        "n_vocab": file.get("vocab_size", int),
        "sliding_window": window,
        "window_layers": layers,
        "declared_causal": file.get(causal, bool),
    }
    names = _unique(file, ((_zlab_name(name.removeprefix("model.")), name) for name in file.tensors))
    neox = file.get(file.first_of("rope_is_neox_style", "dflash_config.rope_is_neox_style"), bool)
    return Dialect(fields, names, interleaved=neox is False)


def _zlab_name(name: str) -> str:
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name)
    if layer and layer[2] in _ZLAB_LAYER:
        return f"blk.{layer[1]}.{_ZLAB_LAYER[layer[2]]}.weight"
    return _ZLAB_GLOBAL.get(name, name)


def _zlab_window(file: SafetensorsFile, n_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """Window in tokens and the layers that have it; it counts only when one of the two switches is on."""
    everywhere = _optional(file, "dflash_config.use_swa", bool, False)
    window = file.get(file.first_of("dflash_config.swa_window_size", "sliding_window"), int)
    if not window or not (everywhere or _optional(file, "use_sliding_window", bool, False)):
        return None, (False,) * n_layers
    if everywhere:
        return window, (True,) * n_layers
    return window, tuple(kind == "sliding_attention" for kind in file.require_array("layer_types", str))


def _gguf_fields(file: GGUFFile, arch: str) -> dict[str, Any]:
    """The fields that both GGUF dialects keep under the same names below `arch`."""
    head_dim = _count(file, f"{arch}.attention.key_length")
    _plain_only(
        file,
        {
            f"{arch}.attention.value_length": head_dim,
            f"{arch}.rope.dimension_count": head_dim,
            f"{arch}.rope.scaling.type": "none",
            f"{arch}.hidden_activation": "silu",
            f"{arch}.embedding_scale": 1.0,
            f"{arch}.attention.value_scale": 1.0,
        },
    )
    n_layers = _count(file, f"{arch}.block_count", MAX_LAYERS)
    window = file.get(f"{arch}.attention.sliding_window", int) or None
    layers: Sequence[bool] = (False,) * n_layers
    if window:
        layers = file.require_array(f"{arch}.attention.sliding_window_pattern", bool)
    theta, eps = f"{arch}.rope.freq_base", f"{arch}.attention.layer_norm_rms_epsilon"
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    n_tokens = len(tokens) if isinstance(tokens, StringArray) else None
    return {
        "n_layers": n_layers,
        "n_embd": _count(file, f"{arch}.embedding_length"),
        "n_ff": _count(file, f"{arch}.feed_forward_length"),
        "n_heads": _count(file, f"{arch}.attention.head_count", MAX_HEADS),
        "n_kv_heads": _count(file, f"{arch}.attention.head_count_kv", MAX_HEADS),
        "head_dim": head_dim,
        "rope_theta": positive(file.error, f"key {theta!r}", file.require(theta, float)),
        "rms_eps": positive(file.error, f"key {eps!r}", file.require(eps, float)),
        "n_vocab": _optional(file, f"{arch}.vocab_size", int, n_tokens),
        "sliding_window": window,
        "window_layers": tuple(layers),
        "declared_causal": file.get(f"{arch}.attention.causal", bool),
    }


def _plain_only(file: KeyedFile, plain: Mapping[str, Any]) -> None:
    """Refuse values that ask for maths which the graph does not have."""
    for key, value in plain.items():
        if (found := file.get(key, type(value))) not in (None, value):
            raise file.error(f"key {key!r} is {describe(found)}, but only {value!r} is supported")


def _unique(file: KeyedFile, pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The mapping of new names to old ones; two old ones must not become the same."""
    names: dict[str, str] = {}
    for new, old in pairs:
        if new in names:
            raise file.error(f"tensors {names[new]!r} and {old!r} are the same one, {new!r}")
        names[new] = old
    return names


def _count(file: KeyedFile, key: str, high: int = MAX_WIDTH) -> int:
    return in_range(file.error, f"key {key!r}", file.require(key, int), 1, high)


def _optional(file: KeyedFile, key: str, kind: type[T], default: T | None) -> T | None:
    value = file.get(key, kind)
    return default if value is None else value
