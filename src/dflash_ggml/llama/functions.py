"""Functions of llama.h that do not need libllama: vocabulary, sizes, metadata, and decoding one sequence.

Arguments and results as in llama.h: handles are `llm.model` and `llm.ctx`, texts are bytes, buffers are ctypes arrays, and a
negative count is the required buffer size. Other functions are missing.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable, Iterable
from ctypes import c_bool, c_int32, c_void_p
from functools import partial
from importlib import metadata
from typing import Any, NewType

from .batch import llama_batch, llama_pos, llama_seq_id, llama_token, new_batch
from .constants import CONSTANTS
from .context import LlamaContext, llama_context_default_params, llama_model_default_params
from .handles import behind
from .model import SPECIAL, LlamaModel

_CONTROL = CONSTANTS["LLAMA_TOKEN_ATTR_CONTROL"]
_token_p = ctypes.POINTER(llama_token)


def _version() -> str:
    return metadata.version("dflash-ggml")


def _text_into(text: str | None, buffer: Any, size: int) -> int:
    """Write a zero-terminated text, truncated to the buffer; returns the whole text's length, -1 without a text."""
    if text is None:
        return -1
    whole = text.encode()
    if size > 0:
        cut = whole[: size - 1] + b"\0"
        ctypes.memmove(buffer, cut, len(cut))
    return len(whole)


def _bytes_into(text: bytes, buffer: Any, size: int) -> int:
    """Write bytes without terminator; returns their number, negative if they do not fit."""
    if len(text) > size:
        return -len(text)
    ctypes.memmove(buffer, text, len(text))
    return len(text)


def _nth(texts: Iterable[str], i: int) -> str | None:
    return dict(enumerate(texts)).get(i)


def _tokenize(
    model: LlamaModel, text: bytes, n: int, tokens: Any, room: int, add: bool, special: bool
) -> int:
    """Write a text's ids to an array; returns their number, negative if the array is too small."""
    ids = model.tokenize(bytes(text[:n]), bool(add), bool(special))
    if len(ids) > room:
        return -len(ids)
    for i, token in enumerate(ids):
        tokens[i] = token
    return len(ids)


def _piece(model: LlamaModel, token: Any, buf: Any, length: int, lstrip: int, special: bool) -> int:
    """Bytes of a token into a buffer, without up to lstrip leading spaces."""
    piece = model.token_to_piece(int(getattr(token, "value", token)), bool(special))
    for _ in range(lstrip):
        piece = piece.removeprefix(b" ")
    return _bytes_into(piece, buf, length)


def _detokenize(
    model: LlamaModel, tokens: Any, n: int, text: Any, room: int, remove_special: bool, unparse_special: bool
) -> int:
    """Bytes of several tokens into a buffer; control tokens by name if unparse_special."""
    ids = [tokens[i] for i in range(n)]
    if remove_special and model.add_bos_token() and ids[:1] == [model.token_bos()]:
        ids = ids[1:]
    return _bytes_into(model.detokenize(ids, bool(unparse_special)), text, room)


def _chat_template(model: LlamaModel, name: bytes | None = None) -> bytes | None:
    """The chat template, the named one if a name is given."""
    key = "tokenizer.chat_template" + ("" if name is None else "." + name.decode())
    value = model.metadata().get(key)
    return None if value is None else value.encode()


@ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int32, _token_p, c_int32, c_bool, c_bool)
def c_tokenize(vocab: Any, text: Any, n: int, tokens: Any, room: int, add: bool, special: bool) -> int:
    """C function pointer of llama_tokenize, for libraries that need one (llguidance)."""
    given = ctypes.string_at(text, n) if n else b""
    return FUNCTIONS["llama_tokenize"](vocab, given, n, tokens, room, add, special)


class Library:
    """Replacement for the loaded shared library, `llama_cpp.llama_cpp._lib`, with the available C pointers."""

    llama_tokenize = c_tokenize


def _batch_of(tokens: Any, n_tokens: int) -> llama_batch:
    """A batch of these tokens after the context's."""
    batch = llama_batch(n_tokens, ctypes.cast(tokens, _token_p))
    batch._memory = tokens
    return batch


def _supports_gpu() -> bool:
    from ..ggml.device import list_devices

    return any(device.is_gpu for device in list_devices())


def _system_info() -> bytes:
    """System information of this engine."""
    return f"dflash-ggml {_version()} on {platform.machine()}, no libllama".encode()


# Functions of a model, of a context, and constant ones, without the prefix `llama_`.
_OF_MODEL: dict[str, Callable[..., Any]] = {
    "model_get_vocab": lambda model: model.vocab or 0,
    "vocab_type": LlamaModel.vocab_type,
    "vocab_n_tokens n_vocab": LlamaModel.n_vocab,
    "vocab_get_text token_get_text": lambda model, token: model.token_get_text(token).encode(),
    "vocab_get_score token_get_score": LlamaModel.token_get_score,
    "vocab_get_attr token_get_attr": LlamaModel.token_get_attr,
    "vocab_is_eog token_is_eog": lambda model, token: token in model.tokenizer.eog_ids,
    "vocab_is_control token_is_control": lambda model, token: bool(model.token_get_attr(token) & _CONTROL),
    "vocab_nl token_nl": LlamaModel.token_nl,
    "vocab_get_add_bos add_bos_token": LlamaModel.add_bos_token,
    "vocab_get_add_eos add_eos_token": LlamaModel.add_eos_token,
    "model_n_ctx_train n_ctx_train": LlamaModel.n_ctx_train,
    "model_n_embd n_embd model_n_embd_inp model_n_embd_out": LlamaModel.n_embd,
    "model_n_layer n_layer": LlamaModel.n_layer,
    "model_n_params": LlamaModel.n_params,
    "model_size": LlamaModel.size,
    "model_meta_count": lambda model: len(model.metadata()),
    "model_meta_val_str": lambda model, key, *buf: _text_into(model.metadata().get(key.decode()), *buf),
    "model_meta_key_by_index": lambda model, i, *buf: _text_into(_nth(model.metadata(), i), *buf),
    "model_meta_val_str_by_index": lambda model, i, *buf: _text_into(
        _nth(model.metadata().values(), i), *buf
    ),
    "model_desc": lambda model, *buf: _text_into(model.desc(), *buf),
    "model_chat_template": _chat_template,
    "tokenize": _tokenize,
    "token_to_piece": _piece,
    "detokenize": _detokenize,
    **{f"vocab_{name} token_{name}": partial(LlamaModel.special, name=name) for name in SPECIAL},
}
_OF_CONTEXT: dict[str, Callable[..., Any]] = {
    "n_ctx n_ctx_seq": LlamaContext.n_ctx,
    "n_batch": lambda ctx: ctx.n_batch,
    "n_ubatch": lambda ctx: ctx.n_ubatch,
    "n_seq_max": lambda ctx: ctx.n_seq_max,
    "n_threads n_threads_batch": lambda ctx: ctx.n_threads,
    "pooling_type": LlamaContext.pooling_type,
    "get_model": lambda ctx: ctx.model.model,
    "get_memory": lambda ctx: ctx.memory,
    "decode": LlamaContext.evaluate,
    "get_logits": LlamaContext.get_logits,
    "get_logits_ith": LlamaContext.get_logits_ith,
    "memory_clear": lambda ctx, data=True: ctx.kv_cache_clear(),
    "memory_seq_rm": LlamaContext.kv_cache_seq_rm,
    "memory_seq_pos_max": lambda ctx, seq_id: ctx.n_tokens - 1,
}
_CONSTANT: dict[str, Any] = {
    "vocab_get_add_sep model_has_encoder model_is_recurrent model_is_diffusion memory_can_shift": False,
    "supports_mmap supports_mlock supports_rpc": False,
    "model_has_decoder model_is_hybrid": True,
    "model_rope_freq_scale_train": 1.0,
    "model_decoder_start_token": -1,
    "max_devices": CONSTANTS["LLAMA_MAX_DEVICES"],
    "max_parallel_sequences": 1,
    # no effect: there is no log to redirect, and memory is freed with its object
    "batch_free log_set synchronize perf_context_print perf_context_reset": None,
    "backend_init backend_free numa_init": None,
}


_OTHERS: dict[str, Callable[..., Any]] = {
    "batch_init": lambda n_tokens, embd, n_seq_max: new_batch(n_tokens, n_seq_max),
    "batch_get_one": _batch_of,
    "supports_gpu_offload": _supports_gpu,
    "print_system_info": _system_info,
    "time_us": lambda: time.monotonic_ns() // 1000,
    "version": lambda: _version().encode(),
    "model_default_params": llama_model_default_params,
    "context_default_params": llama_context_default_params,
}
_TYPES: dict[str, Any] = {
    "batch": llama_batch,
    "token": llama_token,
    "pos": llama_pos,
    "seq_id": llama_seq_id,
    "token_p": _token_p,
    "log_callback": ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, c_void_p),
    **{name: NewType(f"llama_{name}", int) for name in ("model_p", "vocab_p", "context_p", "memory_t")},
}


def _of(kind: type, tell: Callable[..., Any]) -> Callable[..., Any]:
    return lambda handle, *rest: tell(behind(handle, kind), *rest)


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *ignored: value


_ALL = {
    **{names: _of(LlamaModel, tell) for names, tell in _OF_MODEL.items()},
    **{names: _of(LlamaContext, tell) for names, tell in _OF_CONTEXT.items()},
    **{names: _constant(value) for names, value in _CONSTANT.items()},
    **_OTHERS,
    **_TYPES,
}
FUNCTIONS = {f"llama_{name}": value for names, value in _ALL.items() for name in names.split()}
