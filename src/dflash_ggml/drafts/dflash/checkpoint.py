"""Reader of published drafts: safetensors checkpoints with config.json, in z-lab's schema and its derivatives.

z-lab, incoai      DFlash and DFlash2, options below `dflash_config`
DeepSpec           DSpark, options at the top
Poolside           drafts of Laguna; queries, keys and values may be one matrix, and each tap's norm is a separate tensor
speculators        DSpark, the sizes below `transformer_layer_config`; taps are named by the layer they enter, so one higher
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from ...files.keys import KeyedFile, describe
from ...files.safetensors import SafetensorsFile
from ...ggml.operations import Yarn
from ...models.checks import MAX_HEADS, MAX_LAYERS, in_range, positive
from ..dflash2 import SELECTOR, read_selector
from ..dspark import BEFORE, GATE, MAX_RANK, TO_TARGET, Markov
from .fields import DEFAULT_BLOCK, Dialect, count, plain_only, unique
from .params import HEAD, MASK, TAP_NORMS

NESTED = "transformer_layer_config."
_GLOBAL = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": HEAD,
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection": SELECTOR,
    "markov_head.markov_w1": BEFORE,
    "markov_head.markov_w2": "markov_w2.weight",
    "markov_head.gate_proj": GATE,
    "markov_head.gate_proj.bias": "markov_gate.bias",
    "confidence_head.proj": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "d2t": TO_TARGET,
    MASK: MASK,
    TAP_NORMS: TAP_NORMS,
}
_LAYER = {
    "input_layernorm": "attn_norm.weight",
    "post_attention_layernorm": "ffn_norm.weight",
    "self_attn.q_proj": "attn_q.weight",
    "self_attn.k_proj": "attn_k.weight",
    "self_attn.v_proj": "attn_v.weight",
    "self_attn.o_proj": "attn_output.weight",
    "self_attn.g_proj": "attn_gate.weight",
    "self_attn.q_norm": "attn_q_norm.weight",
    "self_attn.k_norm": "attn_k_norm.weight",
    "mlp.gate_proj": "ffn_gate.weight",
    "mlp.up_proj": "ffn_up.weight",
    "mlp.down_proj": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj.weight",
}
_ARCHITECTURES = (
    "DFlashDraftModel",
    "DFlash2DraftModel",
    "Qwen3DSparkModel",
    "DSparkDraftModel",
    "DSparkSpeculator",
    "DFlashLagunaForCausalLM",
)
_TAP_NORM = re.compile(r"(?:model\.)?aux_hidden_norms\.(\d{1,3})\.weight")
_NOT_USED = ("t2d",)  # which of the target's tokens a reduced vocabulary has: redundant with the other table


def read_checkpoint(file: SafetensorsFile) -> Dialect:
    """The dialect of an open checkpoint.

    Raises:
        ModelFileError: A key is missing or wrong; it names it.
    """
    archs = file.get_array("architectures", str)
    if archs is not None and not set(archs) & set(_ARCHITECTURES):
        raise file.error(
            f"key 'architectures': {', '.join(archs)} is not supported, only {', '.join(_ARCHITECTURES)}"
        )
    _part(file)
    is_gated = any(name.endswith("self_attn.g_proj.weight") for name in file.tensors)
    pairs = ((_name(name.removeprefix("model.")), name) for name in file.tensors)
    names = unique(file, ((new, old) for new, old in pairs if new not in _NOT_USED))
    n_layers = count(file, _key(file, "num_hidden_layers"), MAX_LAYERS)
    n_embd = count(file, _key(file, "hidden_size"))
    n_heads = count(file, _key(file, "num_attention_heads"), MAX_HEADS)
    head_key, eps = _key(file, "head_dim"), _key(file, "rms_norm_eps")
    head_dim = count(file, head_key) if head_key in file.metadata else n_embd // n_heads
    window, layers = _window(file, n_layers, is_gated)
    block = file.first_of("dflash_config.block_size", "block_size")
    causal = file.first_of("is_causal", "dflash_config.causal")
    plain_only(
        file,
        {
            _key(file, "hidden_act"): "silu",
            "dflash_config.attention_value_scale": 1.0,
            "dflash_config.input_embedding_scale": 1.0,
            "input_embedding_scale": 1.0,
        },
    )
    n_vocab = file.get(_key(file, "vocab_size"), int)
    n_draft = file.get("draft_vocab_size", int)
    if TO_TARGET in names and n_draft is None:
        n_draft = file.tensors[names[TO_TARGET]].shape[-1]
    is_reduced = n_draft is not None and n_draft != n_vocab
    markov = _markov(file, names)
    if markov is not None and not is_reduced:
        names.pop(HEAD, None)  # a copy of the target's
    if not is_reduced:
        names.pop(TO_TARGET, None)
    n_rot, yarn, theta = _rotary(file, head_dim, is_gated and all(layers))
    fields: dict[str, Any] = {
        "n_layers": n_layers,
        "n_embd": n_embd,
        "n_ff": count(file, _key(file, "intermediate_size")),
        "n_heads": n_heads,
        "n_kv_heads": count(file, _key(file, "num_key_value_heads"), MAX_HEADS),
        "head_dim": head_dim,
        "rope_theta": theta,
        "rms_eps": positive(file.error, f"key {eps!r}", file.require(eps, float)),
        "block_size": file.get(block, int, DEFAULT_BLOCK),
        "mask_id": file.require(file.first_of("dflash_config.mask_token_id", "mask_token_id"), int),
        "taps": _taps(file),
        "n_vocab": n_vocab,
        "sliding_window": window,
        "window_layers": layers,
        "declared_causal": file.get(causal, bool),
        "n_rot": n_rot,
        "yarn": yarn,
        "n_draft_vocab": n_draft if is_reduced else None,
        "selector": _selector(file, names),
        "markov": markov,
    }
    neox = file.get(file.first_of("rope_is_neox_style", "dflash_config.rope_is_neox_style"), bool)
    if neox is False and n_rot is not None:
        raise file.error(
            "key 'rope_is_neox_style' is false, which is not supported where a head rotates in part only"
        )
    return Dialect(fields, names, interleaved=neox is False, is_offset=True)


def _key(file: KeyedFile, name: str) -> str:
    """The key of a layer size: in the layers' section if the schema has one, else at the top level."""
    return NESTED + name if NESTED + name in file.metadata else name


def _name(name: str) -> str:
    layer = re.fullmatch(r"layers\.(\d+)\.(.+?)(\.weight)?", name)
    if layer and layer[2] in _LAYER:
        return f"blk.{layer[1]}.{_LAYER[layer[2]]}"
    return _GLOBAL.get(name) or _GLOBAL.get(name.removesuffix(".weight"), name)


def _taps(file: SafetensorsFile) -> tuple[int, ...]:
    inputs = "aux_hidden_state_layer_ids"
    if inputs in file.metadata:
        return tuple(i - 1 for i in file.require_array(inputs, int))
    return tuple(file.require_array(file.first_of("dflash_config.target_layer_ids", "target_layer_ids"), int))


def _selector(file: SafetensorsFile, names: dict[str, str]):
    if SELECTOR not in names and "dflash_config.selector_rank" not in file.metadata:
        return None
    scale = file.first_of("dflash_config.output_multiplier", "output_multiplier")
    cap = file.first_of("dflash_config.final_logit_softcapping", "final_logit_softcapping")
    return read_selector(file, "dflash_config.", scale, cap)


def _markov(file: SafetensorsFile, names: dict[str, str]) -> Markov | None:
    if BEFORE not in names:
        return None
    key = file.first_of("markov_head_type", "dflash_config.markov_head_type")
    kind = file.get(key, str, "vanilla")
    if kind not in ("vanilla", "gated"):
        raise file.error(
            f"key {key!r}: a Markov head of kind {kind!r} is not supported, only 'vanilla' and 'gated'"
        )
    rank = in_range(file.error, "rank of the Markov head", file.tensors[names[BEFORE]].shape[0], 1, MAX_RANK)
    anchor = file.first_of(
        "sample_from_anchor", "dflash_config.sample_from_anchor", "dflash_config.shift_label"
    )
    from_anchor = file.get(anchor, bool)
    if from_anchor is None:  # as llama.cpp's converter distinguishes them
        is_speculators = any(key.startswith(NESTED) for key in file.metadata)
        from_anchor = not is_speculators and "aux_hidden_state_layer_ids" not in file.metadata
    return Markov(rank, kind == "gated", from_anchor)


def _part(file: SafetensorsFile) -> None:
    """Normalise Poolside's form: q, k and v in one matrix are split, and norms of single taps joined."""
    made: dict[str, tuple[int, tuple[int, ...], np.ndarray]] = {}
    gone: list[str] = []
    for name, info in file.tensors.items():
        if not name.endswith("self_attn.qkv_proj.weight"):
            continue
        heads, kv_heads = (
            count(file, _key(file, f"num_{x}_heads"), MAX_HEADS) for x in ("attention", "key_value")
        )
        width = count(file, _key(file, "head_dim"))
        if len(info.shape) != 2 or info.shape[1] != (heads + 2 * kv_heads) * width:
            raise file.error(
                f"tensor {name!r} has shape {list(info.shape)}, expected rows of {heads} + 2 * {kv_heads} heads of {width}"
            )
        rows, at = file.data(name).reshape(info.shape[1], -1), 0
        for part, n in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            data = rows[at * width : (at + n) * width].reshape(-1)
            made[name.replace("qkv_proj", f"{part}_proj")] = (info.type, (info.shape[0], n * width), data)
            at += n
        gone.append(name)
    norms = {int(m[1]): m[0] for name in file.tensors if (m := _TAP_NORM.fullmatch(name))}
    if norms:
        parts = [file.tensors[norms[i]] for i in sorted(norms)]
        if sorted(norms) != list(range(len(norms))) or len({(p.type, p.shape) for p in parts}) > 1:
            raise file.error(
                f"tensor {norms[min(norms)]!r}: the norms of the taps are not 0 to n, or not alike"
            )
        data = np.concatenate([file.data(part.name) for part in parts])
        made[TAP_NORMS] = (parts[0].type, (*parts[0].shape, len(parts)), data)
        gone += norms.values()
    file.replace(gone, made)


def _window(file: SafetensorsFile, n_layers: int, is_gated: bool) -> tuple[int | None, tuple[bool, ...]]:
    """Window in tokens, and the layers with it; only valid if one of the two switches is on, or for Poolside's drafts, which
    have no switch."""
    everywhere = file.get("dflash_config.use_swa", bool, False)
    size = "dflash_config.swa_window_size"
    window = file.get(size if size in file.metadata else _key(file, "sliding_window"), int)
    if not window or not (everywhere or file.get(_key(file, "use_sliding_window"), bool, is_gated)):
        return None, (False,) * n_layers
    if everywhere:
        return window, (True,) * n_layers
    kinds = file.require_array(_key(file, "layer_types"), str)
    return window, tuple(kind == "sliding_attention" for kind in kinds)


def _rotary(file: SafetensorsFile, head_dim: int, is_near: bool) -> tuple[int | None, Yarn | None, float]:
    """Rotated dimensions (None: the whole head), scaling of positions, and the base. is_near: of window layers."""
    whole = ("rope_parameters.", "rope_scaling.")
    kind = "sliding_attention" if is_near else "full_attention"
    prefixes = [p + name for p in (NESTED, "") for name in (*whole, f"rope_parameters.{kind}.")]

    def key(name: str, *others: str) -> str:
        """The first key that the file has, or the most common one."""
        asked = (*(p + name for p in prefixes), *others)
        return next((k for k in asked if k in file.metadata), others[0] if others else "rope_scaling." + name)

    theta = key("rope_theta", _key(file, "rope_theta"))
    base = positive(file.error, f"key {theta!r}", file.require(theta, float))
    part = key("partial_rotary_factor", _key(file, "partial_rotary_factor"))
    share = file.get(part, float)
    n_rot = None if share in (None, 1.0) else int(head_dim * share)
    kind = key("rope_type", key("type"))
    found = file.get(kind, str)
    if found in (None, "default"):
        return n_rot, None, base
    if found != "yarn":
        raise file.error(f"key {kind!r} is {describe(found)}, but only 'default' and 'yarn' are supported")
    factor = key("factor")
    stretch = in_range(file.error, f"key {factor!r}", file.require(factor, float), 1.0, 1e6)
    attention = file.get(key("attention_factor", key("attn_factor")), float)
    if attention is None:
        attention = 1 + 0.1 * math.log(stretch)
    fast, slow = file.get(key("beta_fast"), float), file.get(key("beta_slow"), float)
    n_ctx = count(file, key("original_max_position_embeddings"), 1 << 30)
    return n_rot, Yarn(stretch, n_ctx, attention, fast or 32.0, slow or 1.0), base
