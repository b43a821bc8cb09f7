"""`dflash-train`: a draft for a target that is there as a transformers checkpoint, from text or from what the target writes."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DflashError
from ..files.safetensors import read_json
from ..train.corpus import Rows, answered_rows, beginnings, document_rows, joined, load_rows, read_texts
from ..train.own_text import KEPT, write_rows
from ..train.recipe import KINDS, Run, Shape, check, check_head, shape_of, spread
from .interrupt import Interrupt
from .parser import Parser, Version
from .streams import can_write
from .wording import count

CHECKPOINT = "training.pt"


def build_parser() -> Parser:
    run = Run()
    parser = Parser(prog="dflash-train", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action=Version, nargs=0, help="print the version and leave")
    parser.add_argument("target", type=Path, help="folder of the target: config.json, safetensors, tokenizer")
    where = "where the draft and the checkpoint go"
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help=where)
    text = parser.add_argument_group("text")
    what = (
        "text files, folders of them, .jsonl with text, prompt or messages, or own-text.npz of an earlier run"
    )
    text.add_argument("--data", type=Path, nargs="+", default=[], metavar="PATH", help=what)
    what = "of a folder's files take those that end so, e.g. .py .md"
    text.add_argument("--suffix", nargs="+", default=[], metavar="END", help=what)
    own = "let the target write so many tokens first, behind prompts or beginnings of the texts (kept as own-text.npz)"
    _add(
        text,
        ("--max-bytes", int, "N", 400_000_000, "read no more text than this (default 400 MB)"),
        ("--own-text", int, "TOKENS", 0, own),
        ("--own-share", float, "P", 0.7, "share of its own text in a batch (default 0.7)"),
        ("--prompt", int, "N", 96, "tokens of a text that it goes on from (default 96)"),
        ("--temperature", float, "T", 0.8, "of what it writes (default 0.8)"),
        ("--greedy", float, "P", 0.5, "share of rows that it writes greedily (default 0.5)"),
        ("--write-batch", int, "N", 64, "rows that it writes at once (default 64)"),
    )
    draft = parser.add_argument_group("draft")
    draft.add_argument(
        "--kind", choices=KINDS, help="what to train (default dflash, or what --start-from is)"
    )
    _add(
        draft,
        ("--start-from", Path, "FOLDER", None, "begin with a published draft's weights and sizes"),
        ("--layers", int, "N", None, "layers (default 5)"),
        ("--ffn", int, "N", None, "width of the feed-forward layers (default: the target's)"),
        ("--heads", int, "N", None, "query heads (default 32)"),
        ("--kv-heads", int, "N", None, "key/value heads (default 8)"),
        ("--head-dim", int, "N", None, "size of a head (default 128)"),
        ("--block", int, "N", None, "columns of a block, the pending token's included (default 16)"),
        ("--taps", _layers, "I,J,..", None, "target layers that it reads, from 0 (default: five, spread)"),
        ("--mask-id", int, "ID", None, "token of masked columns (default: the tokenizer's or an unused one)"),
        ("--window", int, "N", None, "attention window of all layers but the last (default 0: none)"),
        ("--rank", int, "N", None, "rank of pair scores, dflash2 and dspark (default 256)"),
        ("--candidates", int, "K", None, "candidates per depth, dflash2 (default 16)"),
        ("--group", int, "N", None, "channels that share a dynamic weight, dflash2 (default 16)"),
        ("--draft-steps", int, "N", None, "tokens in a row that a prediction head learns (default 4)"),
    )
    what = "a gated Markov head, dspark; llama.cpp does not read it"
    draft.add_argument("--gated", action="store_true", default=None, help=what)
    loop = parser.add_argument_group("run")
    _add(
        loop,
        ("--steps", int, "N", 0, "steps to train (default: as many as --minutes allows)"),
        ("--minutes", float, "M", 0.0, "minutes to train, without writing text and checks"),
        ("--batch", int, "N", run.batch, f"rows a step (default {run.batch})"),
        ("--length", int, "N", run.length, f"tokens a row (default {run.length})"),
        ("--anchors", int, "N", run.anchors, f"blocks a row (default {run.anchors})"),
        ("--lr", float, "X", run.lr, f"highest learning rate (default {run.lr:g})"),
        ("--warm-up", int, "N", run.warm_up, f"steps until it is reached (default {run.warm_up})"),
        ("--gamma", float, "G", 0.0, "depth at which a token counts 1/e (default: by the block)"),
        ("--seed", int, "N", run.seed, f"of all that is drawn (default {run.seed})"),
        ("--held", int, "N", run.checked, f"rows held out for the check (default {run.checked})"),
        ("--save-minutes", float, "M", run.save_minutes, "minutes between checkpoints (default 10)"),
        ("--device", _device, "NAME", None, "cpu, cuda or cuda:N (default: cuda where there is one)"),
        ("--keep", float, "GIB", None, "memory for the target's features (default: a quarter of all free)"),
    )
    for flag, what in (
        ("--resume", "go on from the folder's checkpoint, with the options that it began with"),
        ("--compile", "compile the draft with torch.compile"),
        ("--graph", "replay steps as a CUDA graph: faster for drafts of a small target"),
    ):
        loop.add_argument(flag, action="store_true", help=what)
    return parser


def _add(group: Any, *rows: tuple[str, Callable[[str], Any], str, Any, str]) -> None:
    """Add options with a value: flag, what reads it, its name in the help, default, help."""
    for flag, kind, name, default, what in rows:
        group.add_argument(flag, type=kind, metavar=name, default=default, help=what)


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no list of layers such as 1,8,15") from None


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", text):
        raise ArgumentTypeError(f"{text!r} is none of cpu, cuda, cuda:N")
    return text


def check_text(args) -> None:
    """Raises ConfigError for options of the text that cannot be."""
    for name, value, low, high in (
        ("--own-text", args.own_text, 0, 1 << 40),
        ("--own-share", args.own_share, 0, 1),
        ("--prompt", args.prompt, 1, max(1, args.length - 2) if args.own_text else 1 << 30),
        ("--temperature", args.temperature, 0, 100),
        ("--greedy", args.greedy, 0, 1),
        ("--write-batch", args.write_batch, 1, 1 << 16),
        ("--max-bytes", args.max_bytes, 1, 1 << 50),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{name} is {value}, it must be from {low} to {high}")


def tell(line: str) -> None:
    """A line of progress."""
    print(line, flush=True)


def train(args, interrupt: Interrupt) -> bool:
    """Write text, train, check. False where it was interrupted. Raises DflashError, OSError."""
    path = args.target / "config.json"
    if args.kind == "mtp" and path.exists():
        check_head(read_json(path), path)
    check_text(args)
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as lack:
        raise ConfigError(f"the package {lack.name} is missing: pip install 'dflash-ggml[train]'") from None
    try:
        return _train(args, interrupt)
    except torch.OutOfMemoryError as full:
        said = str(full).splitlines()[0]
        raise ConfigError(
            f"the GPU's memory is full ({said}); a smaller --batch, fewer --anchors or a smaller --write-batch takes less"
        ) from None


def _train(args, interrupt: Interrupt) -> bool:
    import torch

    from ..train.block_net import BlockNet
    from ..train.head_net import HeadNet
    from ..train.loop import Trainer
    from ..train.publish import start_from
    from ..train.target import TargetModel

    run = _run(args)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu":
        n = torch.cuda.device_count()
        if (torch.device(device).index or 0) >= n:
            raise ConfigError(f"--device {device}: torch finds {count(n, 'GPU')} here")
        torch.cuda.set_device(device)
    torch.manual_seed(run.seed)
    torch.set_float32_matmul_precision("high")
    target = TargetModel(args.target, device, torch.float32 if device == "cpu" else torch.bfloat16)
    shape = _shape(args, target)
    check(shape, run, target.sizes)
    net = (
        HeadNet(shape, target.sizes, target.decoder) if shape.kind == "mtp" else BlockNet(shape, target.sizes)
    )
    if args.start_from is not None and not args.resume:
        missing = start_from(args.start_from, net, target.tables)
        tell(
            f"{args.start_from}: {count(len(missing), 'tensor')} of this draft are not in it and begin at random"
        )
    own, texts = _rows(args, run, target, interrupt)
    learnt, held = _split(own, texts, run, args.own_share)
    net = net.to(device)
    parameters = sum(p.numel() for p in net.parameters())
    tell(
        f"{shape.kind}, {parameters / 1e6:.1f} M parameters; {len(learnt)} rows, {learnt.n_tokens} tokens to learn from"
    )
    if args.graph and device == "cpu":
        raise ConfigError("--graph needs a GPU")
    room = _room(args, device)
    trainer = Trainer(net, shape, run, target, learnt, held, args.output, room, args.compile, args.graph)
    if args.resume:
        trainer.resume()
        tell(f"going on from step {trainer.step}")
    done = trainer.fit(tell, lambda: interrupt.asked)
    if not done:
        tell(f"saved at step {trainer.step}; --resume goes on")
        return False
    found = trainer.check()
    depths = " ".join(f"{share:.2f}" for share in found.right)
    tell(
        f"held-out rows: a chain has {found.accepted:.2f} tokens a step accepted, {found.blocks} blocks; right by depth: {depths}"
    )
    tell(_next(args, shape))
    return True


def _next(args, shape: Shape) -> str:
    what = "target's GGUF with the head" if shape.kind == "mtp" else "draft as GGUF"
    return f"{args.output}: dflash-convert {args.output} -m TARGET.gguf -o OUT.gguf --type q8_0 writes the {what}"


def _run(args) -> Run:
    return Run(
        steps=args.steps,
        minutes=args.minutes,
        batch=args.batch,
        length=args.length,
        anchors=args.anchors,
        lr=args.lr,
        warm_up=args.warm_up,
        gamma=args.gamma,
        seed=args.seed,
        save_minutes=args.save_minutes,
        checked=args.held,
    )


def _shape(args, target) -> Shape:
    """The draft's sizes: those of --start-from, or usual ones, and over them those that were given."""
    if args.start_from is not None and args.kind != "mtp":
        path = args.start_from / "config.json"
        shape = shape_of(read_json(path), path, target.sizes)
        shape = replace(shape, kind=args.kind or shape.kind)
    else:
        taps = spread(target.sizes.n_layers, 5)
        mask = 0 if args.kind == "mtp" else args.mask_id if args.mask_id is not None else target.mask_id()
        shape = Shape(args.kind or "dflash", 5, target.sizes.n_ff, 32, 8, 128, 16, taps, mask)
    names = {
        "layers": "n_layers",
        "ffn": "n_ff",
        "heads": "n_heads",
        "kv_heads": "n_kv_heads",
        "head_dim": "head_dim",
        "block": "block_size",
        "taps": "taps",
        "mask_id": "mask_id",
        "window": "window",
        "rank": "rank",
        "candidates": "candidates",
        "group": "group",
        "gated": "gated",
        "draft_steps": "n_steps",
    }
    given = {field: getattr(args, name) for name, field in names.items() if getattr(args, name) is not None}
    return replace(shape, **given)


def _rows(args, run: Run, target, interrupt: Interrupt) -> tuple[Rows | None, Rows | None]:
    """Rows that the target wrote, and rows of texts that others did."""
    import numpy as np

    stored = [path for path in args.data if path.suffix == ".npz"]
    kept = args.output / KEPT
    if args.own_text and kept.exists() and kept not in stored:
        stored.append(kept)
        tell(f"text: {kept} is used, and nothing written; remove it to have it written again")
    elif args.own_text and stored:
        tell(f"text: {stored[0]} is used, and nothing written")
    own = [load_rows(path).cut(run.length) for path in stored]
    paths = [path for path in args.data if path.suffix != ".npz"]
    others: list[Rows] = []
    if paths:
        read = read_texts(paths, args.max_bytes, target.render if target.has_template else None, args.suffix)
        documents = document_rows(read.documents, target.encode, run.length, target.sizes.eos)
        if len(documents):
            others.append(documents)
        if read.answered:
            own.append(answered_rows(read.answered, target.encode, run.length))
        if args.own_text and not stored:
            rng = np.random.default_rng(run.seed)
            prompts = target.encode(read.prompts) if read.prompts else []
            prompts = [ids for ids in prompts if 0 < len(ids) <= run.length // 2]
            n = max(1, args.own_text // max(1, run.length - args.prompt))
            if not prompts:
                if not len(documents):
                    raise ConfigError(
                        "--own-text needs prompts, or texts of at least --length tokens, in --data"
                    )
                prompts = beginnings(documents, args.prompt, n, rng)
            prompts = [prompts[i % len(prompts)] for i in range(n)]
            heat = np.where(rng.random(n) < args.greedy, 0.0, args.temperature).tolist()
            asked = args.output, prompts, run.length, heat, args.write_batch, run.seed
            own.append(write_rows(target, *asked, tell, lambda: interrupt.asked))
    own = [rows for rows in own if len(rows)]
    if not own and not others:
        raise ConfigError(
            f"--data: no row of {run.length} tokens in it; give more text or a smaller --length"
        )
    return (joined(own) if own else None), (joined(others) if others else None)


def _split(own: Rows | None, texts: Rows | None, run: Run, share: float) -> tuple[Rows, Rows]:
    """Rows to learn from, those of texts so many that a batch has `share` of the target's own; and rows held out."""
    import numpy as np

    rng = np.random.default_rng(run.seed)
    source = own if own is not None else texts
    assert source is not None
    if len(source) < 2:
        raise ConfigError(
            f"one row of {run.length} tokens is too little; give more text or a smaller --length"
        )
    order = rng.permutation(len(source))
    n = max(1, min(run.checked, len(source) // 4))
    held, learnt = source.take(order[:n]), source.take(order[n:])
    if own is not None and texts is not None and share < 1:
        wanted = int(len(learnt) * (1 - share) / max(share, 1e-6))
        learnt = joined([learnt, texts.take(rng.permutation(len(texts))[:wanted])])
    return learnt, held


def _room(args, device: str) -> float:
    """Bytes that the target's features may take."""
    if args.keep is not None:
        return args.keep * 2**30
    if device == "cpu":
        return 2.0**30
    import torch

    return torch.cuda.mem_get_info()[0] / 4


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit codes: 0 trained, 1 failed, 2 bad option, 130 interrupted."""
    if not can_write("dflash-train"):
        return 1
    parser = build_parser()
    args = parser.parse_args(argv)
    if not args.resume and (args.output / CHECKPOINT).exists():
        parser.error(f"-o: {args.output} has a checkpoint already; --resume goes on from it")
    try:
        with Interrupt() as interrupt:
            return 0 if train(args, interrupt) else 130
    except (DflashError, OSError) as error:
        print(f"dflash-train: {error}", file=sys.stderr)
        return 1
