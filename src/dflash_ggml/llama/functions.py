"""The functions of llama.h that need no libllama: vocabulary, sizes, metadata, and decoding one sequence.

Arguments and results as there: handles are `llm.model` and `llm.ctx`, texts are bytes, buffers are ctypes arrays, and a
negative count says how much room was lacking. Functions that are not here are not there at all.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, NewType

from .constants import CONSTANTS
from .context import LlamaContext, llama_batch, llama_pos, llama_seq_id, llama_token, new_batch
from .handles import behind
from .model import LlamaModel

llama_model_p = NewType("llama_model_p", int)
llama_vocab_p = NewType("llama_vocab_p", int)
llama_context_p = NewType("llama_context_p", int)
llama_memory_t = NewType("llama_memory_t", int)
llama_token_p = ctypes.POINTER(llama_token)
llama_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)

Function = Callable[..., Any]
# filled by `_share`; the names of the module are theirs
FUNCTIONS: dict[str, Function] = {}


def _version() -> str:
    return metadata.version("dflash-ggml")


def _model(handle: Any) -> LlamaModel:
    return behind(handle, LlamaModel)


def _context(handle: Any) -> LlamaContext:
    return behind(handle, LlamaContext)


def _text_into(text: bytes, buffer: Any, size: int) -> int:
    """Write a text with its closing zero, cut to the buffer; the length of the whole text."""
    if size > 0:
        cut = text[: size - 1] + b"\0"
        ctypes.memmove(buffer, cut, len(cut))
    return len(text)


def _bytes_into(text: bytes, buffer: Any, size: int) -> int:
    """Write bytes without a zero; minus their number where they do not fit."""
    if len(text) > size:
        return -len(text)
    ctypes.memmove(buffer, text, len(text))
    return len(text)


def _ids_of(tokens: Any, n: int) -> list[int]:
    return [tokens[i] for i in range(n)]


# --- texts and tokens


def llama_tokenize(
    vocab: Any,
    text: bytes,
    text_len: int,
    tokens: Any,
    n_tokens_max: int,
    add_special: bool,
    parse_special: bool,
) -> int:
    """Ids of a text into an array; their number, or minus that number where the array is too small."""
    ids = _model(vocab).tokenize(bytes(text[:text_len]), bool(add_special), bool(parse_special))
    if len(ids) > n_tokens_max:
        return -len(ids)
    for i, token in enumerate(ids):
        tokens[i] = token
    return len(ids)


def llama_token_to_piece(vocab: Any, token: int, buf: Any, length: int, lstrip: int, special: bool) -> int:
    """Bytes of a token into a buffer, without up to lstrip leading spaces."""
    piece = _model(vocab).token_to_piece(int(getattr(token, "value", token)), bool(special))
    for _ in range(lstrip):
        piece = piece.removeprefix(b" ")
    return _bytes_into(piece, buf, length)


def llama_detokenize(
    vocab: Any,
    tokens: Any,
    n_tokens: int,
    text: Any,
    text_len_max: int,
    remove_special: bool,
    unparse_special: bool,
) -> int:
    """Bytes of several tokens into a buffer; control tokens by name if unparse_special."""
    model, ids = _model(vocab), _ids_of(tokens, n_tokens)
    if remove_special and model.add_bos_token() and ids[:1] == [model.token_bos()]:
        ids = ids[1:]
    return _bytes_into(model.detokenize(ids, bool(unparse_special)), text, text_len_max)


@ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.POINTER(llama_token),
    ctypes.c_int32,
    ctypes.c_bool,
    ctypes.c_bool,
)
def c_tokenize(
    vocab: Any,
    text: Any,
    text_len: int,
    tokens: Any,
    n_tokens_max: int,
    add_special: bool,
    parse_special: bool,
) -> int:
    """llama_tokenize behind a C function pointer, for libraries that hand that on (llguidance)."""
    given = ctypes.string_at(text, text_len) if text_len else b""
    return llama_tokenize(vocab, given, text_len, tokens, n_tokens_max, add_special, parse_special)


class Library:
    """What stands for the loaded shared library, `llama_cpp.llama_cpp._lib`: C pointers to what has one."""

    llama_tokenize = c_tokenize


# --- decoding


def llama_batch_init(n_tokens: int, embd: int, n_seq_max: int) -> llama_batch:
    """An empty batch of token ids; embd must be 0."""
    return new_batch(n_tokens, n_seq_max)


def llama_batch_get_one(tokens: Any, n_tokens: int) -> llama_batch:
    """A batch of these tokens behind what the context holds."""
    batch = llama_batch(n_tokens, ctypes.cast(tokens, llama_token_p))
    batch._memory = tokens
    return batch


def llama_batch_free(batch: llama_batch) -> None:
    """Nothing: the memory goes with the object."""


def llama_decode(ctx: Any, batch: llama_batch) -> int:
    """See LlamaContext.evaluate."""
    return _context(ctx).evaluate(batch)


def llama_get_logits_ith(ctx: Any, i: int) -> Any:
    """See LlamaContext.get_logits_ith."""
    return _context(ctx).get_logits_ith(i)


def llama_memory_clear(mem: Any, data: bool = True) -> None:
    """Empty the context."""
    _context(mem).kv_cache_clear()


def llama_memory_seq_rm(mem: Any, seq_id: int, p0: int, p1: int) -> bool:
    """See LlamaContext.kv_cache_seq_rm."""
    return _context(mem).kv_cache_seq_rm(seq_id, p0, p1)


def llama_memory_seq_pos_max(mem: Any, seq_id: int) -> int:
    """The last position that is held, -1 if none."""
    return _context(mem).llama.n_tokens - 1


# --- metadata


def llama_model_meta_val_str(model: Any, key: bytes, buf: Any, buf_size: int) -> int:
    """A metadata value as text; -1 if there is none."""
    value = _model(model).metadata().get(key.decode())
    return -1 if value is None else _text_into(value.encode(), buf, buf_size)


def llama_model_meta_key_by_index(model: Any, i: int, buf: Any, buf_size: int) -> int:
    """The i-th metadata key; -1 if there is none."""
    keys = list(_model(model).metadata())
    return _text_into(keys[i].encode(), buf, buf_size) if 0 <= i < len(keys) else -1


def llama_model_meta_val_str_by_index(model: Any, i: int, buf: Any, buf_size: int) -> int:
    """The i-th metadata value as text; -1 if there is none."""
    values = list(_model(model).metadata().values())
    return _text_into(values[i].encode(), buf, buf_size) if 0 <= i < len(values) else -1


def llama_model_desc(model: Any, buf: Any, buf_size: int) -> int:
    """Architecture and name."""
    return _text_into(_model(model).desc().encode(), buf, buf_size)


def llama_model_chat_template(model: Any, name: bytes | None = None) -> bytes | None:
    """The chat template, the named one if a name is given."""
    key = "tokenizer.chat_template" + ("" if name is None else "." + name.decode())
    value = _model(model).metadata().get(key)
    return None if value is None else value.encode()


# --- the library as a whole


def llama_supports_gpu_offload() -> bool:
    """Whether there is a GPU."""
    from ..ggml.device import list_devices

    return any(device.is_gpu for device in list_devices())


def llama_print_system_info() -> bytes:
    """What stands here in place of libllama."""
    return f"dflash-ggml {_version()} on {platform.machine()}, no libllama".encode()


def llama_log_set(log_callback: Any, user_data: Any = None) -> None:
    """Nothing: this package has no log to redirect; verbose=False silences the statistics."""


def _share(names: str, function: Function) -> None:
    for name in names.split():
        FUNCTIONS[name] = function


_share("llama_model_get_vocab", lambda model: llama_vocab_p(_model(model).vocab or 0))
_share("llama_vocab_type", lambda vocab: _model(vocab).vocab_type())
_share("llama_vocab_n_tokens llama_n_vocab", lambda vocab: _model(vocab).n_vocab())
_share(
    "llama_vocab_get_text llama_token_get_text",
    lambda vocab, token: _model(vocab).token_get_text(token).encode(),
)
_share(
    "llama_vocab_get_score llama_token_get_score", lambda vocab, token: _model(vocab).token_get_score(token)
)
_share("llama_vocab_get_attr llama_token_get_attr", lambda vocab, token: _model(vocab).token_get_attr(token))
_share("llama_vocab_is_eog llama_token_is_eog", lambda vocab, token: token in _model(vocab).tokenizer.eog_ids)
_share(
    "llama_vocab_is_control llama_token_is_control",
    lambda vocab, token: bool(_model(vocab).token_get_attr(token) & CONSTANTS["LLAMA_TOKEN_ATTR_CONTROL"]),
)
for _name in [
    "bos",
    "eos",
    "eot",
    "cls",
    "sep",
    "pad",
    "mask",
    "fim_pre",
    "fim_suf",
    "fim_mid",
    "fim_pad",
    "fim_rep",
    "fim_sep",
]:
    _share(
        f"llama_vocab_{_name} llama_token_{_name}", lambda vocab, _name=_name: _model(vocab).special(_name)
    )
_share("llama_vocab_nl llama_token_nl", lambda vocab: _model(vocab).token_nl())
_share("llama_vocab_get_add_bos llama_add_bos_token", lambda vocab: _model(vocab).add_bos_token())
_share("llama_vocab_get_add_eos llama_add_eos_token", lambda vocab: _model(vocab).add_eos_token())
_share("llama_vocab_get_add_sep", lambda vocab: False)

_share("llama_model_n_ctx_train llama_n_ctx_train", lambda model: _model(model).n_ctx_train())
_share(
    "llama_model_n_embd llama_n_embd llama_model_n_embd_inp llama_model_n_embd_out",
    lambda model: _model(model).n_embd(),
)
_share("llama_model_n_layer llama_n_layer", lambda model: _model(model).n_layer())
_share("llama_model_n_params", lambda model: _model(model).n_params())
_share("llama_model_size", lambda model: _model(model).size())
_share("llama_model_meta_count", lambda model: len(_model(model).metadata()))
_share("llama_model_rope_freq_scale_train", lambda model: 1.0)
_share("llama_model_has_encoder llama_model_is_recurrent llama_model_is_diffusion", lambda model: False)
_share("llama_model_has_decoder llama_model_is_hybrid", lambda model: True)
_share("llama_model_decoder_start_token", lambda model: -1)

_share("llama_n_ctx llama_n_ctx_seq", lambda ctx: _context(ctx).n_ctx())
_share("llama_n_batch", lambda ctx: _context(ctx).llama.n_batch)
_share("llama_n_ubatch", lambda ctx: _context(ctx).llama.context_params.n_ubatch)
_share("llama_n_seq_max", lambda ctx: _context(ctx).llama.n_seq_max)
_share("llama_n_threads llama_n_threads_batch", lambda ctx: _context(ctx).llama.n_threads)
_share("llama_pooling_type", lambda ctx: _context(ctx).pooling_type())
_share("llama_get_model", lambda ctx: _context(ctx).model.model)
_share("llama_get_memory", lambda ctx: _context(ctx).memory)
_share("llama_get_logits", lambda ctx: _context(ctx).get_logits())
_share("llama_memory_can_shift", lambda mem: False)
_share("llama_synchronize llama_perf_context_print llama_perf_context_reset", lambda ctx: None)

_share("llama_backend_init llama_backend_free", lambda: None)
_share("llama_numa_init", lambda numa: None)
_share("llama_supports_mmap llama_supports_mlock llama_supports_rpc", lambda: False)
_share("llama_max_devices", lambda: CONSTANTS["LLAMA_MAX_DEVICES"])
_share("llama_max_parallel_sequences", lambda: 1)
_share("llama_time_us", lambda: time.monotonic_ns() // 1000)
_share("llama_version", lambda: _version().encode())

FUNCTIONS |= {
    name: value
    for name, value in list(globals().items())
    if name.startswith("llama_") and (callable(value) or isinstance(value, type))
}
FUNCTIONS |= {"llama_pos": llama_pos, "llama_seq_id": llama_seq_id}
