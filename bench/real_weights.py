"""Logits and perplexity of one GGUF file by several implementations: ours, llama.cpp's and transformers'.

    python bench/real_weights.py logits dflash -m FILE --text TEXT --out ours.npy [--float]
    python bench/real_weights.py logits llama.cpp -m FILE --text TEXT --out theirs.npy
    python bench/real_weights.py logits transformers -m FILE --text TEXT --out exact.npy
    python bench/real_weights.py compare ours.npy theirs.npy
    python bench/real_weights.py perplexity llama.cpp -m FILE --text TEXT [-c 512]
    python bench/real_weights.py float -m FILE --out FLOAT.gguf

Each role needs its own package and none of the others': a file of logits is float32 [positions, vocabulary], with ids.npy
beside it, which the first role writes (ours) and the others read. `float` writes the file with its matrices as float32: what
the others compute with. `--float`: our plain kernels and float32 K/V. Perplexity as in llama.cpp's tool: windows of n_ctx
tokens, each from an empty context, its first token BOS where the model wants one, the second half of each scored; `dflash-bench
perplexity` must give the same.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import sys
import time
from pathlib import Path

import numpy as np

BATCH = 256


def by_dflash(a: argparse.Namespace) -> np.ndarray:
    from common import Solo

    from dflash_ggml.config import EngineConfig

    exact = {"type_k": "f32", "type_v": "f32", "reference": True} if a.float else {}
    config = EngineConfig(a.model, n_ctx=a.positions + 64, n_threads=a.threads, calibrate="never", **exact)
    with Solo.load(config) as engine:
        ids = engine.tokenizer.encode(a.text.read_text(encoding="utf-8"))[: a.positions]
        np.save(a.out.parent / "ids.npy", np.array(ids, np.int32))
        rows, sequence = [], engine.sequence
        for at in range(0, len(ids), BATCH):
            part = ids[at : at + BATCH]
            graph = engine.passes.linear(sequence, part, outputs="every")
            rows.append(engine.device.read(graph.outputs["logits"]).reshape(len(part), -1))
            sequence.tokens.extend(part)
    return np.concatenate(rows)


class LlamaCpp:
    """A context of llama.cpp through llama-cpp-python's low-level functions."""

    def __init__(self, path: Path, n_ctx: int, threads: int, exact: bool, plain: bool = False) -> None:
        import llama_cpp

        self.lib = lib = llama_cpp
        self._quiet = lib.llama_log_callback(
            lambda *_: None
        )  # kept: the library calls it as long as it lives
        lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        lib.llama_backend_init()
        loading = lib.llama_model_default_params()
        loading.use_extra_bufts = not plain
        self.model = lib.llama_model_load_from_file(str(path).encode(), loading)
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.n_vocab = lib.llama_vocab_n_tokens(self.vocab)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_ctx, 512
        params.n_threads = params.n_threads_batch = threads
        if exact:
            params.type_k = params.type_v = 0
            params.flash_attn_type = 0
        self.ctx = lib.llama_init_from_model(self.model, params)

    def tokens(self, text: str, bos: bool) -> list[int]:
        data = text.encode()
        out = (self.lib.llama_token * (len(data) + 8))()
        n = self.lib.llama_tokenize(self.vocab, data, len(data), out, len(out), bos, False)
        return list(out[:n])

    def bos(self) -> int | None:
        add = self.lib.llama_vocab_get_add_bos(self.vocab)
        return self.lib.llama_vocab_bos(self.vocab) if add else None

    def logits(self, ids: list[int]) -> np.ndarray:
        """After each of `ids`, from an empty context."""
        lib = self.lib
        lib.llama_memory_clear(lib.llama_get_memory(self.ctx), True)
        batch = lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, True
        if lib.llama_decode(self.ctx, batch):
            raise SystemExit("llama_decode failed")
        found = np.ctypeslib.as_array(lib.llama_get_logits(self.ctx), (len(ids), self.n_vocab)).copy()
        lib.llama_batch_free(batch)
        return found


def by_llama_cpp(a: argparse.Namespace) -> np.ndarray:
    ids = np.load(a.out.parent / "ids.npy").tolist()
    model = LlamaCpp(a.model, len(ids) + 64, a.threads, a.float)
    if model.tokens(a.text.read_text(encoding="utf-8"), False)[: len(ids)] != ids:
        print("the token ids differ")
    return model.logits(ids)


def by_transformers(a: argparse.Namespace) -> np.ndarray:
    sys.path.pop(0)  # transformers looks for a package that is called as a script here
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(a.model)
    arch = reader.fields["general.architecture"].contents()
    field = lambda key: reader.fields[f"{arch}.{key}"].contents()  # noqa: E731
    weights = {
        t.name: dequantize(t.data, t.tensor_type).reshape(t.shape[::-1].tolist()) for t in reader.tensors
    }
    heads, d = field("attention.head_count"), field("embedding_length")
    sizes = {
        "vocab_size": len(weights["token_embd.weight"]),
        "hidden_size": d,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": field("context_length"),
        "tie_word_embeddings": "output.weight" not in weights,
    }
    rope = {"rope_type": "default", "rope_theta": field("rope.freq_base")}
    if arch == "gemma3":
        kind = Gemma3ForCausalLM
        ropes = {"full_attention": rope, "sliding_attention": {**rope, "rope_theta": 10000.0}}
        own = {"head_dim": field("attention.key_length"), "sliding_window": field("attention.sliding_window")}
        config = Gemma3TextConfig(
            **sizes, **own, rope_parameters=ropes, query_pre_attn_scalar=own["head_dim"]
        )
    else:
        kind, config = LlamaForCausalLM, LlamaConfig(**sizes, rope_parameters=rope)
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    parts = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    parts |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {"attn_output": "self_attn.o_proj"}
    parts |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    if arch == "gemma3":  # checkpoints have norms less one
        parts |= {"ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
        parts["post_attention_norm"] = "post_attention_layernorm"
        parts |= {f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"}
        weights = {name: x - 1 if "norm" in name else x for name, x in weights.items()}
    state = {}
    for name, x in weights.items():
        stem = name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            if arch == "llama" and part in (
                "attn_q",
                "attn_k",
            ):  # pairs that turn together lie half a head apart in checkpoints
                x = x.reshape(-1, d // heads // 2, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
            state[f"model.layers.{layer}.{parts[part]}.weight"] = x
        else:
            state[f"{names[stem]}.weight"] = x
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    torch.set_num_threads(a.threads)
    model = kind._from_config(config, dtype=torch.float32, attn_implementation="eager")
    tensors = {name: torch.from_numpy(np.ascontiguousarray(x, np.float32)) for name, x in state.items()}
    model.load_state_dict(tensors, strict=True)
    with torch.no_grad():
        return model.eval()(torch.tensor([np.load(a.out.parent / "ids.npy").tolist()])).logits[0].numpy()


ROLES = {"dflash": by_dflash, "llama.cpp": by_llama_cpp, "transformers": by_transformers}


def write_float(model: Path, out: Path) -> None:
    """The file with its matrices as float32, its keys as they are."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize

    reader = GGUFReader(model)
    writer = GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            of = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], of)
    for t in reader.tensors:
        writer.add_tensor(t.name, dequantize(t.data, t.tensor_type).reshape(t.shape[::-1].tolist()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compare(paths: list[Path]) -> None:
    """Largest and mean distance of two files' rows, relative to the second's range, and how often their best tokens agree."""
    ours, theirs = (np.load(path).astype(np.float64) for path in paths)
    error = np.abs(ours - theirs)
    rms = math.sqrt(float((error**2).mean() / (theirs**2).mean()))
    print(
        f"{len(ours)} positions: largest difference {error.max():.5f} of logits up to {np.abs(theirs).max():.2f} "
        f"({error.max() / np.abs(theirs).max():.2e}), rms {rms:.2e}, "
        f"best token the same {(ours.argmax(1) == theirs.argmax(1)).mean():.5f}"
    )


def perplexity(a: argparse.Namespace) -> None:
    """By llama.cpp."""
    model = LlamaCpp(a.model, a.ctx, a.threads, a.float, a.plain)
    ids, bos, n = model.tokens(a.text.read_text(encoding="utf-8"), True), model.bos(), a.ctx
    windows, first, total, count = len(ids) // n, n // 2, 0.0, 0
    started = time.perf_counter()
    for i in range(windows):
        window = ids[i * n : (i + 1) * n]
        rows = model.logits([bos, *window[1:]] if bos is not None else window)[first:-1]
        rows -= rows.max(1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(1, keepdims=True, dtype=np.float64))
        total -= rows[np.arange(len(rows)), window[first + 1 :]].sum()
        count += len(rows)
    seconds = time.perf_counter() - started
    print(
        f"{windows} windows of {n}: perplexity {math.exp(total / count):.5f} over {count} tokens, {seconds:.1f} s"
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sub = p.add_subparsers(dest="what", required=True)
    for what, roles in (("logits", list(ROLES)), ("perplexity", ["llama.cpp"]), ("float", [])):
        q = sub.add_parser(what)
        if roles:
            q.add_argument("by", choices=roles)
            q.add_argument("--text", type=Path, required=True)
        q.add_argument("-m", "--model", type=Path, required=True)
        q.add_argument("--out", type=Path, default=Path("logits.npy"))
        q.add_argument("--positions", type=int, default=2000)
        q.add_argument("-c", "--ctx", type=int, default=512)
        q.add_argument("-t", "--threads", type=int, default=2)
        q.add_argument("--float", action="store_true")
        q.add_argument("--plain", action="store_true", help="llama.cpp's weights as they are, not repacked")
    q = sub.add_parser("compare")
    q.add_argument("paths", type=Path, nargs=2)
    a = p.parse_args()
    if a.what == "logits":
        np.save(a.out, ROLES[a.by](a))
    elif a.what == "perplexity":
        perplexity(a)
    elif a.what == "float":
        write_float(a.model, a.out)
    else:
        compare(a.paths)


if __name__ == "__main__":
    main()
