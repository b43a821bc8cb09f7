"""Trainer of the tests' small mixture-of-experts target, with a count of the experts that neighbouring tokens need.

    python tools/train_demo_moe.py TOKENIZER -o FOLDER --data FOLDER.. --minutes 3 [--experts 64] [--counts FILE]

TOKENIZER is a folder with tokenizer.json, tokenizer_config.json and config.json of the demonstration target, whose vocabulary
this one shares. The result is a transformers checkpoint (`Qwen3_5MoeForCausalLM`), which llama.cpp's converter reads. `--counts`
writes, for a trained router and for the one that it began with, the distinct experts of a layer that N tokens touch:
as a chain of the text, and as siblings, the N likeliest tokens of one position. Needs torch and transformers, and a GPU for
more than a trial.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as classes

from dflash_ggml.train.corpus import document_rows, read_texts
from dflash_ggml.train.gated_delta import use_chunked_delta_nets

WIDTHS = (1, 2, 4, 8, 16, 32, 64)


def all_experts(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Experts as one wide layer whose parts a token does not use are multiplied by 0: for small experts the fastest way."""
    share = torch.zeros(len(hidden), self.num_experts, dtype=weights.dtype, device=hidden.device)
    share = share.scatter(1, index, weights)
    both = F.linear(hidden, self.gate_up_proj.flatten(0, 1)).unflatten(-1, (self.num_experts, 2, -1))
    inner = F.silu(both[:, :, 0]) * both[:, :, 1] * share[..., None].to(both.dtype)
    return F.linear(inner.flatten(1), self.down_proj.transpose(0, 1).flatten(1))


def make_model(args, sizes: dict) -> Qwen3_5MoeForCausalLM:
    """The model with weights of deviation 1 / sqrt(inputs)."""
    kinds = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(args.layers)]
    config = Qwen3_5MoeTextConfig(
        vocab_size=sizes["vocab_size"],
        eos_token_id=sizes["eos_token_id"],
        pad_token_id=sizes["pad_token_id"],
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        layer_types=kinds,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=1,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=args.experts,
        num_experts_per_tok=args.used,
        moe_intermediate_size=args.expert_width,
        shared_expert_intermediate_size=2 * args.expert_width,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    )
    model = Qwen3_5MoeForCausalLM._from_config(config, dtype=torch.float32)
    for name, p in model.named_parameters():
        if p.ndim < 2 or "conv1d" in name:
            continue
        scale = (
            (2 * args.layers) ** -0.5
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj"))
            else 1.0
        )
        torch.nn.init.normal_(p, std=0.02 if "embed" in name else scale * p.shape[-1] ** -0.5)
    return model


class Routes:
    """Router outputs of a model's layers in its last pass: logits [tokens, experts] a layer."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.found: list[torch.Tensor] = []
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(self._keep)

    def _keep(self, gate: torch.nn.Module, args: tuple, out: object) -> None:
        hidden = args[0]
        self.found.append(F.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight))

    def take(self) -> list[torch.Tensor]:
        """They, and forget them."""
        found, self.found = self.found, []
        return found


def balance(routes: list[torch.Tensor], used: int) -> torch.Tensor:
    """1 where all experts of each layer are used alike, more else (arXiv 2101.03961)."""
    total = torch.zeros((), device=routes[0].device)
    for logits in routes:
        p = logits.float().softmax(-1)
        share = torch.zeros_like(p).scatter(1, p.topk(used, -1).indices, 1.0).mean(0) / used
        total = total + (share * p.mean(0)).sum() * p.shape[-1]
    return total / len(routes)


def autocast(device: str):
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


@torch.no_grad()
def count(model, routes: Routes, ids: torch.Tensor, used: int, positions: int = 48) -> dict[str, list[float]]:
    """Mean number of distinct experts a layer that N = WIDTHS tokens touch, of rows ids [n, T]."""

    def distinct(logits: torch.Tensor) -> float:
        """logits [sets, N, experts]."""
        picked = logits.topk(used, -1).indices
        hit = torch.zeros(len(logits), logits.shape[-1], device=logits.device)
        return float(hit.scatter(1, picked.flatten(1), 1).sum(1).mean())

    device = ids.device.type
    with autocast(device):
        logits = model(input_ids=ids, use_cache=False).logits
    by_layer = [x.unflatten(0, ids.shape) for x in routes.take()]
    n, length = ids.shape
    at = torch.linspace(32, length - max(WIDTHS) - 1, positions).long().tolist()
    chain = [
        float(np.mean([distinct(x[:, p : p + w].contiguous()) for x in by_layer for p in at])) for w in WIDTHS
    ]
    siblings: list[list[float]] = [[] for _ in WIDTHS]
    for p in at[:: max(1, positions // 8)]:
        likely = logits[:, p - 1].topk(max(WIDTHS), -1).indices  # [n, W]
        rows = ids[:, None, : p + 1].repeat(1, max(WIDTHS), 1)
        rows[:, :, p] = likely
        with autocast(device):
            model(input_ids=rows.flatten(0, 1), use_cache=False, logits_to_keep=1)
        for x in routes.take():
            last = x.unflatten(0, (n, max(WIDTHS), p + 1))[:, :, p]
            for found, w in zip(siblings, WIDTHS):
                found.append(distinct(last[:, :w].contiguous()))
    return {"chain": chain, "siblings": [float(np.mean(s)) for s in siblings]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--max-bytes", type=int, default=100_000_000)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--used", type=int, default=8)
    parser.add_argument("--expert-width", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--balance", type=float, default=0.01)
    parser.add_argument("--counts", type=Path)
    parser.add_argument("--counted", type=int, default=12, help="rows of text that are counted")
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    classes.Qwen3_5MoeExperts.forward = all_experts
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    sizes = json.loads((args.tokenizer / "config.json").read_text())
    began = time.monotonic()
    texts = read_texts(args.data, args.max_bytes, None, [".py"]).documents
    rows = document_rows(
        texts,
        lambda part: [e.ids for e in tokenizer.encode_batch(list(part), add_special_tokens=False)],
        args.length + 1,
        sizes["pad_token_id"],
    )
    print(
        f"{len(texts)} texts, {rows.ids.size / 1e6:.1f} M tokens, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    order = np.random.default_rng(1).permutation(len(rows))
    held = torch.from_numpy(rows.ids[order[:64]].astype(np.int64)).to(device)
    learnt = torch.from_numpy(rows.ids[order[64:]]).to(device)
    model = make_model(args, sizes).to(device)
    use_chunked_delta_nets(model)
    routes = Routes(model)
    counts = {"random": count(model, routes, held[: args.counted, :-1], args.used)}
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device == "cuda")
    began, step = time.monotonic(), 0
    while (done := (time.monotonic() - began) / (60 * args.minutes)) < 1:
        for group in optimiser.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 200) * min(1.0, max(0.02, (1 - done) / 0.4))
        picked = learnt[torch.randint(0, len(learnt), (args.batch,), device=device)].long()
        with autocast(device):
            logits = model(input_ids=picked[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), picked[:, 1:].flatten())
        even = balance(routes.take(), args.used)
        (loss + args.balance * even).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        step += 1
        if step % 200 == 0 or step < 3:
            rate = step * args.batch * args.length / (time.monotonic() - began)
            print(
                f"step {step}: loss {float(loss):.3f}, balance {float(even):.3f}, {rate:.0f} tokens/s",
                flush=True,
            )
    model.eval()
    with torch.no_grad(), autocast(device):
        logits = model(input_ids=held[:, :-1], use_cache=False).logits
        routes.take()
    loss = float(F.cross_entropy(logits.float().flatten(0, 1), held[:, 1:].flatten()))
    counts["trained"] = count(model, routes, held[: args.counted, :-1], args.used)
    print(f"{step} steps, held-out loss {loss:.3f}", flush=True)
    if args.counts:
        found = {
            "experts": args.experts,
            "used": args.used,
            "widths": WIDTHS,
            "held_out_loss": loss,
            **counts,
        }
        args.counts.write_text(json.dumps(found, indent=1) + "\n")
    model.to(torch.bfloat16).save_pretrained(args.output)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.tokenizer / name, args.output / name)
    print(f"{args.output}: written")


if __name__ == "__main__":
    main()
